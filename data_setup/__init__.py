"""Bucket of retinal OCT -> batches of uint8 volumes with their masks.

In: DICOM volumes or other image files, a manifest and a table of participants. Out: a prepared store, and
from it global batches that depend on (seed, step) only. The flat files are the story in reading order:
protocols, manifest, readers/, resample, prepare, store/, transforms, masks, normalisation,
order, loader. check, expand, attach/, index/ and phantom/ are side doors. Read prepare.py first.
"""
