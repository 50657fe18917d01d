"""Probes: what features tell about a participant or about a token, with intervals.

In: features and truth, never of one person on both sides. Out: scores, paired differences with participant-
bootstrap intervals, and a verdict. Read participants.py first.
"""
