"""`python -m benchmarks.accelerator`: what a GPU, or this CPU, makes of the training step and of whole runs.

In: minutes, and a folder. Out: results.json and page.md there. Read cli.py first.
"""
