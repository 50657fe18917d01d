"""Heads and their training: on frozen features, or with the whole encoder.

In: a source, its cohort, features or volumes. Out: `head.pt` with its calibration. Read frozen.py first, then
finetune.py.
"""
