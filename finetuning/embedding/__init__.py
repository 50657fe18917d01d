"""Features of whole collections: what `python -m finetuning.embed` does.

In: a checkpoint, a prepared store or DICOM files. Out: features.parquet and patches.zarr. Read run.py first:
volumes.py reads, folder.py writes.
"""
