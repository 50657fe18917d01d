"""Numbers that tell learning from collapse, and time from waste.

In: what a training step computed, and validation volumes. Out: the metrics of a log line, and alarms. Read
monitor.py first.
"""
