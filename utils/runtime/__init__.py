"""The engines: plain torch, torchrun and PyTorch/XLA, behind one `Runtime`.

In: the environment that a launcher made. Out: a device, a group of processes, and the few operations whose
form depends on them. Only xla.py here knows torch_xla. Read single.py first.
"""
