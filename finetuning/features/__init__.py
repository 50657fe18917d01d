"""Frozen features, computed once and kept, and the rows of a table that have them.

In: a frozen encoder, a prepared store, rows. Out: pooled features or tokens of each row; those that are kept
are not computed again. Read kept.py first, whose docstring is the layout, then entries.py.
"""
