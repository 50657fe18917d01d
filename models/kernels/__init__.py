"""Kernels: attention for engines that need their own, and the squared errors of the loss of neighbours.

In and out: the tensors of one call. Attention's are put into the programs of an engine
(utils/runtime/xla_kernels.py); plain torch does without.
"""
