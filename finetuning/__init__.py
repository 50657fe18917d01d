"""A checkpoint -> heads, predictions, and what they are worth.

In: a checkpoint, the prepared store, labels. Out: heads, tables with intervals, figures. The commands, in the
order of use:

    power      what a cohort can show, before anything is trained
    train      a head on frozen features, the whole model, or a decoder of layers, classes or slabs
    evaluate   a checkpoint by probes, or a head
    compare    checkpoints side by side
    predict    what a head says of a file
    embed      features of a collection

Who is learnt from and judged on: cohort/. What is read of them: features/. What is trained: heads/, dense/.
What it is worth: answers/. OMP_WAIT_POLICY: see pretraining/__init__.py.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
