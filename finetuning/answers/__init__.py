"""What a checkpoint or a head is worth, in numbers with intervals.

In: predictions of a cohort's people. Out: evaluation.json and its tables and figures. Read scorecard.py
first, then evaluation.py and subject.py.
"""
