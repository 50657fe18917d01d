"""How near one eye's volumes of several devices are, and how well what is predicted of them agrees.

In: standardised features of volumes, or values of eyes on devices. Out: nearest neighbours and intraclass
correlations, with a resample of participants as weights.

Robustness index: Koemen et al. 2025 (arXiv:2507.17845, after de Jong et al., arXiv:2501.18055),
SO / (SO + OS), with one neighbour: of the same eye on another device (SO) and other eyes on the same device
(OS), which is nearest by cosine. The fellow eye is no neighbour: it shares much of the anatomy.

Intraclass correlation: Shrout and Fleiss 1979, of single measurements: ICC(2,1), agreement (devices are a
sample of devices; an offset between them counts as disagreement), and ICC(3,1), consistency (it does not).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Nearest:
    """For each volume what lies nearest to it."""

    same_eye: np.ndarray  # bool [n]: the same eye on another device, rather than another eye on this device
    chance: np.ndarray  # [n]: the probability of same_eye were the order of these volumes random
    counted: np.ndarray  # bool [volumes]: which have both kinds of neighbours, and a place in the other two


def nearest(features_nF: np.ndarray, eye: np.ndarray, person: np.ndarray, device: np.ndarray) -> Nearest:
    """Neighbours by cosine; one volume for each eye and device. A volume that lacks either kind of neighbour
    is left out of same_eye and chance; ValueError where all do.
    """
    length = np.linalg.norm(features_nF, axis=1, keepdims=True)
    unit = features_nF / np.maximum(length, np.finfo(np.float64).tiny)
    near = unit @ unit.T
    is_eye, is_device = eye[:, None] == eye, device[:, None] == device
    kinds = (is_eye & ~is_device, (person[:, None] != person) & is_device)
    best = np.stack([np.where(mask, near, -np.inf).max(axis=1) for mask in kinds], axis=1)
    count = np.stack([mask.sum(axis=1) for mask in kinds], axis=1)
    whole = np.asarray((count > 0).all(axis=1))
    if not whole.any():
        raise ValueError("expected volumes with both kinds of neighbours, found none")
    # of equals another eye wins, so that features without information are not robust
    return Nearest(best[whole, 0] > best[whole, 1], count[whole, 0] / count[whole].sum(axis=1), whole)


def icc(values_ND: np.ndarray, draws_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ICC(2,1), ICC(3,1), each [S], of N eyes on D devices; draws_SN: how often a resample has each eye."""
    n, num = draws_SN.sum(axis=1), values_ND.shape[1]
    values_ND = values_ND - values_ND.mean()
    eye_N, whole_S = values_ND.mean(axis=1), draws_SN @ values_ND.mean(axis=1) / n
    device_SD = draws_SN @ values_ND / n[:, None]
    total_S = draws_SN @ (values_ND**2).sum(axis=1) - n * num * whole_S**2
    of_eyes_S = num * (draws_SN @ eye_N**2 - n * whole_S**2)
    of_devices_S = n * ((device_SD - whole_S[:, None]) ** 2).sum(axis=1)
    between_S, judges_S = of_eyes_S / (n - 1), of_devices_S / (num - 1)
    error_S = (total_S - of_eyes_S - of_devices_S) / ((n - 1) * (num - 1))
    consistency = between_S + (num - 1) * error_S
    agreement = consistency + num * (judges_S - error_S) / n
    above = between_S - error_S
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / agreement, above / consistency
