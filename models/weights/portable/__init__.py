"""An encoder that takes a volume as it was acquired, and tests itself.

In: a checkpoint of ours. Out: a folder with weights, a torch.export program that resamples and normalises by
itself, preprocess.json, and a golden eye with its features; and `selftest`, which names what is wrong with a
pipeline that should give the same features. Read program.py first, then write.py and selftest.py.
"""

from models.weights.portable.selftest import load_portable, selftest

__all__ = ["load_portable", "selftest"]
