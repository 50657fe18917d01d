"""`python -m utils.report`: run directories become one page, and results.json each.

In: metrics, snapshots and results of runs. Out: one page with a verdict, curves, slices and tables, which
fetches nothing. run_files.py reads a run, health.py judges it; volumes.py, tables.py, overview.py
and pictures.py make its parts, page.py draws the curves and puts all together with assets/. Read cli.py
first.
"""
