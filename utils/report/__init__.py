"""`python -m utils.report`: a run directory becomes report.html and results.json.

In: metrics, snapshots and probe results of a run. Out: one page with numbers, curves and pictures.
run_files.py reads the run, tables.py and pictures.py show it, page.py puts them together. Read cli.py first.
"""
