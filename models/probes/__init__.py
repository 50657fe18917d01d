"""Probes: what features tell about a participant or about a token, with intervals.

In: features and truth, with no person on both sides of a probe. Out: scores, paired differences with
participant-bootstrap intervals, and a verdict. Read participants.py first.
"""
