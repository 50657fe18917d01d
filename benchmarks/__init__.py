"""Measurements behind the documents; each is a command that prints its table.

In: this machine. Out: numbers with their command, for docs/. Nothing outside imports this room. Read
phantom_truth.py first.
"""
