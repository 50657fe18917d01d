"""Attention kernels for engines that need their own.

In and out: the tensors of one attention call. Plain torch uses none of them. The engine puts them into its
programs (utils/runtime/xla_kernels.py).
"""
