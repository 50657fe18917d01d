"""A checkpoint -> heads, predictions, and what they are worth.

In: a checkpoint, the prepared store, labels. Out: heads, tables with intervals, figures. Who is learnt from
and judged on: labels.py, then cohort.py. The commands, in the order of use:

    power        what a cohort can show, before anything is trained
    train        a head on frozen features (frozen.py), or the whole model (finetune.py, tuned, update)
    evaluate     a checkpoint by probes, or a head (evaluation.py: metrics, scorecard, subgroups, curves)
    evaluate --same-eye  do several devices agree about one eye (same_eye/)
    leaderboard  checkpoints side by side (board/)
    truth        the phantom's layers, which the demo asks for

OMP_WAIT_POLICY: see pretraining/__init__.py.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
