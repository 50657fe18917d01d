"""Tables: cells of TSV, CSV and Parquet (text.py), the people of a cohort, and who of them is in which split.

In: a URL. Out: rows of text, a `Participant` for each person, sets of ids. Read text.py first.
"""
