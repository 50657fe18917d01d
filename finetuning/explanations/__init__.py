"""Whether a head's maps show what was planted: `python -m finetuning.explain`.

In: a head of classes and the phantom of data_setup.phantom --thin. Out: explanations.json beside the head, a
table and a picture. Read run.py first: eyes.py chooses the eyes and their truth, arms.py makes the controls,
measure.py scores the maps of an eye, table.py says what the scores allow, picture.py draws some eyes.
"""
