"""`python -m utils.report`: a run directory -> report.html and results.json.

In: metrics, snapshots and probe results of a run. Out: one page with numbers, curves and pictures. Read
cli.py first.
"""
