"""What every room needs and none owns: configuration, storage, engines, checkpoints, logs, reports.

Nothing here imports another room. Read config/ first.
"""
