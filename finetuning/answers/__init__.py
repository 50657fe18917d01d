"""What a checkpoint or a head is worth, in numbers with intervals, and checkpoints side by side.

In: predictions of a cohort's people; checkpoints and a labelled store. Out: evaluation.json with its tables
and figures; the leaderboard. Read scorecard.py first, then evaluation.py; of the
leaderboard leaderboard.py, then columns.py.
"""
