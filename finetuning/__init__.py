"""A checkpoint -> what its encoder is worth.

In: a checkpoint and a store. Out: probe scores with intervals beside those of random initialisation. Read
evaluate.py first.

OMP_WAIT_POLICY: see pretraining/__init__.py.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
