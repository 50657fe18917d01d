"""A prepared store -> a pre-trained encoder, with gauges that tell learning from collapse.

In: a configuration and a store. Out: a run directory with checkpoints, metrics and pictures. Read train.py
first: the loop, then step.py: one update.

OpenMP threads that wait must sleep, not spin: where a loader worker or another program shares the cores,
spinning made a step take 1.9-5.2 s instead of 1.3 s, against 0.7 s and 0.6 s on an idle machine (2 cores).
The setting is read when torch is loaded, hence here; a value in the environment wins.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
