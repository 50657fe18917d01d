"""Encoder, predictor and target encoder, their losses, and the probes that judge them.

In: normalised views [B, 1, D, H, W] and token ids. Out: features and per-sample losses. Nothing here knows
files of volumes, devices or the training loop. Read vit3d.py first, then vjepa3d.py.
"""
