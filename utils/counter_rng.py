"""Stateless random numbers: a hash of (seed, counter), the same bits on CPU, CUDA and XLA.

In: integer seeds and counters of any broadcastable shapes. Out: float32 of the broadcast shape. There is no
generator and no state, so a number depends neither on the batch layout nor on what was drawn before, and a
compiled graph stays one graph. The mixer is a 32-bit xor-shift-multiply hash (multipliers of Wellons'
"lowbias32" search) with the key added again between its two multiplications, so that the streams of two seeds
are not shifted copies of each other. The few keys are computed in int64; the many counters in wrapping int32,
which is half the memory traffic and native on every accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor

shift_right = torch.bitwise_right_shift  # for `>>` XLA divides, and rounds negative numbers up
MASK_32 = 0xFFFFFFFF
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B
GOLDEN = 0x9E3779B9
# Mean and standard deviation of the sum of four independent uniform bytes.
BYTES_MEAN = 4 * 255 / 2
BYTES_STD = (4 * (256**2 - 1) / 12) ** 0.5


def _mix(x: Tensor) -> Tensor:
    """The 32-bit hash of values 0 .. 2^32 - 1 in int64; products wrap, only their low 32 bits are kept."""
    x = x ^ shift_right(x, 16)
    x = (x * MULTIPLY_1) & MASK_32
    x = x ^ shift_right(x, 15)
    x = (x * MULTIPLY_2) & MASK_32
    return x ^ shift_right(x, 16)


def _keys(seed: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys of every int64 seed >= 0, each dependent on all of its bits."""
    low, high = seed & MASK_32, shift_right(seed, 32) & MASK_32
    key_1 = _mix(low ^ _mix(high ^ GOLDEN))
    key_2 = _mix(((key_1 + GOLDEN) & MASK_32) ^ high)
    sign = 2**31  # x ^ sign - sign reads the same 32 bits as a signed number, so the cast is exact
    return ((key_1 ^ sign) - sign).to(torch.int32), ((key_2 ^ sign) - sign).to(torch.int32)


def counter_bits(seed: Tensor, counter: Tensor) -> Tensor:
    """int32 [*broadcast], 32 random bits each; seed int64 >= 0, counter an integer below 2^31."""
    key_1, key_2 = _keys(seed)
    x = counter.to(torch.int32) ^ key_1
    # Shifts of int32 copy the sign; the mask makes them logical. In place: these tensors are volumes.
    x.bitwise_xor_(shift_right(x, 16).bitwise_and_(0xFFFF))
    x.mul_(MULTIPLY_1).add_(key_2)
    x.bitwise_xor_(shift_right(x, 15).bitwise_and_(0x1FFFF))
    x.mul_(MULTIPLY_2 - 2**32)  # the same 32 bits, signed
    return x.bitwise_xor_(shift_right(x, 16).bitwise_and_(0xFFFF))


def counter_uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """float32 [*broadcast], uniform in [0, 1) on the 24-bit grid, hence exact on every engine."""
    return (shift_right(counter_bits(seed, counter), 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def counter_normal(seed: Tensor, counter: Tensor) -> Tensor:
    """float32 [*broadcast] with mean 0 and variance 1, bell-shaped, within +-3.45.

    It is the standardised sum of the hash's four bytes: integers up to the last two operations, where
    Box-Muller would call log and cos, whose last bits differ between engines.
    """
    bits = counter_bits(seed, counter)
    # two sums of two bytes, 16 bits apart
    pairs = (bits & 0xFF00FF).add_(shift_right(bits, 8).bitwise_and_(0xFF00FF))
    total = pairs.add_(shift_right(pairs, 16)).bitwise_and_(0xFFFF)
    return total.to(torch.float32).sub_(BYTES_MEAN).mul_(1.0 / BYTES_STD)
