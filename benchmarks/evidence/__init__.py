"""`python -m benchmarks.evidence`: recipes and their changes under one probe protocol, on phantom cohorts.

In: phantom cohorts and a budget. Out: results.md. arms.py lists what is compared,
queue.py runs it, scores.py probes it, differences.py compares, page.py writes. Read arms.py first.
"""
