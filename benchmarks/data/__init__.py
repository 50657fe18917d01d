"""`python -m benchmarks.data`: the speed of preparing, reading and loading volumes.

In: generated files. Out: a table beside a plain loop of pydicom and MONAI. Read cli.py first.
"""
