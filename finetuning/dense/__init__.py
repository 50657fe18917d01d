"""Decoders of every A-scan or voxel: task.kind layers, segmentation and translation, rows of one table.

In: a frozen encoder, a store with heights, label volumes or flow. Out: folds of volumes, trained decoders in
a head's file, estimates with intervals. Read kind.py first (what a row of the table is), then training.py and
evaluation.py, which serve all rows; crossfit.py trains and evaluates them in folds of people.
"""
