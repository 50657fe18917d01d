"""What a head says of files: `python -m finetuning.predict`.

In: a head of finetuning.train and volumes of finetuning/embedding/. Out: predictions.jsonl and a picture a
volume. Read run.py first. predictors.py answers for each kind of head, files.py writes whole scans,
evidence.py says which tokens a prediction rests on, lines.py what weakens it, picture.py draws.
"""
