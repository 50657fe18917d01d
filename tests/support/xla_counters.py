"""What torch_xla counts: programs compiled and executed, tensors read back, operations left to the
CPU.

The imports are inside: tests that use these are collected where there is no torch_xla.
"""


def count_compiled() -> int:
    return _samples("CompileTime")


def count_executed() -> int:
    """Programs, however often each."""
    return _samples("ExecuteReplicatedTime")


def count_kept_programs() -> tuple[int, int]:
    """Programs that an earlier start has kept, and those not; a CPU compiles what was kept anew."""
    import torch_xla.debug.metrics as metrics

    hits, refused, misses = (
        metrics.counter_value(f"PersistentCache{kind}") or 0 for kind in ("Hit", "DeserializeFailure", "Miss")
    )
    return hits + refused, misses


def count_read_back() -> int:
    """Transfers from the device to the host; each waits for the device."""
    return _samples("TransferFromDeviceTime")


def count_fallbacks() -> dict[str, int]:
    """Calls of each operation that has no XLA form."""
    import torch_xla.debug.metrics as metrics

    return {
        name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")
    }


def _samples(name: str) -> int:
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data(name)
    return 0 if data is None else int(data[0])
