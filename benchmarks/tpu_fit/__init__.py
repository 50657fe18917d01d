"""`python -m benchmarks.tpu_fit`: does a training step fit a TPU that is not there, and how fast at best.

In: a configuration and the name of a TPU slice. Out: memory per chip, FLOPs and a lower bound of the step's
time. env.py builds the environments, trace.py records the step, compile.py compiles it, verdict.py reads the
result. Read cli.py first.
"""
