"""The parts of the leaderboard: what its columns compute, how rows are compared.

In: checkpoints and a labelled store. Out: answers that are computed once, tables, a page. Read
leaderboard.py first, then columns.py.
"""
