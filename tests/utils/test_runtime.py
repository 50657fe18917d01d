"""What the runtime does to the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from utils.errors import UserError
from utils.runtime.processes import Group
from utils.runtime.single import Runtime

FAULTS = """
import resource, torch
from utils.runtime.open import open_runtime
if {tuned}: open_runtime(use_bf16=False)
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(20):
    if step == 10: start = faults()
    torch.ones(8 * 2**20)
print(faults() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is what is tuned")
def test_memory_is_kept_between_steps() -> None:
    """Ten more tensors of 32 MiB, one after the other, get pages that are there."""
    counts = {}
    for tuned in (True, False):
        code = FAULTS.format(tuned=tuned)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        counts[tuned] = int(done.stdout)
    assert counts[True] < 100 < counts[False]


def test_only_one_process_may_be_asked_to_share_its_weights_out() -> None:
    """One device has all of them; the processes of torchrun cannot."""
    weight = torch.ones(4, 4)
    alone, two = (Runtime(torch.device("cpu"), use_bf16=False, group=Group()) for _ in range(2))
    alone.shard_parameters([weight])
    assert not alone.is_sharded
    assert alone.full_state({"weight": weight})["weight"] is weight
    two.group.size = 2
    with pytest.raises(UserError, match=r"train.shard_parameters: .* found 2 processes"):
        two.shard_parameters([weight])
