"""Features and predictions of whole collections: `python -m finetuning.embed` and `finetuning.predict`.

In: a checkpoint or a head, a prepared store or DICOM files. Out: features.parquet, patches.zarr,
predictions.jsonl. Read run.py first. volumes.py reads, stream.py embeds, folder.py writes;
answers.py predicts.
"""
