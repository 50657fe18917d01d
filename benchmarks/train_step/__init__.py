"""`python -m benchmarks.train_step`: a training step beside the same step of Hugging Face's modules.

In: a configuration. Out: a table of times, utilisation and memory. Read cli.py first.
"""
