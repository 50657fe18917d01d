"""Frozen features, computed once and kept.

In: a frozen encoder, a prepared store, rows. Out: pooled features or tokens of each row; those that are kept
are not computed again. Read kept.py, whose docstring is the layout.
"""
