"""Volumes out again: a row of a store, or an original of a manifest, as NIfTI or OME-TIFF.

In: a store and rows, or a manifest and its paths. Out: a file a volume, with its geometry, which this
project's own readers read back equal. `__main__.py` first; `volume.py` gathers and writes. predictions.py is
not of this command: it writes what heads see, with the parts of DICOM files in items.py.
"""
