"""Features of whole collections: `python -m finetuning.embed`.

In: a checkpoint, a prepared store or DICOM files. Out: features.parquet, patches.zarr. Read run.py first.
volumes.py reads, stream.py makes tokens. finetuning/prediction/ reads by the same path.
"""
