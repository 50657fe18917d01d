"""The prepared store: one uint8 chunk a volume in a Zarr v3 group, and one index of rows.

In: resampled volumes with their records. Out: volumes and index columns by row number. Nothing else opens
Zarr. Read format.py first: its docstring is the layout.
"""
