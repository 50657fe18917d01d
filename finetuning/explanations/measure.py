"""Scores of the maps of each planted eye: does the map say where the change is, and does the head use it?

In: arms and eyes. Out: `Measured`.

* AUPRC (average precision, scikit-learn) of a map against the planted tokens, among valid tokens; what a map
  that knows nothing gets is their share.
* deletion curve: tokens are hidden in the order of the map, 2 to 20 % of them; the mean loss of the explained
  output over these steps, in standard deviations of that output over all eyes, less that of a random order
  and of the same map of a head of random weights. It says whether the head rests on what the map shows, not
  whether that is the change. `planted first` hides the planted tokens first: what a map that knows the truth
  would get.

Maps that have no head: the grey value of a token, and the share of other people's eyes whose change is in the
same token. A map that is not above the second knows where changes are as a rule, not where this one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import reduce
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from data_setup.loader import evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.store.reader import PreparedStore
from finetuning.explanations.arms import RANDOM_HEAD, TRAINED, Arm, by_encoder
from finetuning.explanations.eyes import Eyes
from finetuning.prediction.evidence import OCCLUSION, against_others, cheap_map, outputs_of
from finetuning.prediction.occlusion import hidden_outputs, occlusion_maps
from utils.config.schema import Config
from utils.runtime.single import Runtime
from utils.terminal import track

SHARES = (0.02, 0.05, 0.1, 0.2)  # of the valid tokens that are hidden
BRIGHTNESS, PLACE = "brightness", "usual_place"
RANDOM_ORDER, TRUTH_ORDER = "random order", "planted first"
Key = tuple[str, str]  # arm, method


@dataclass(frozen=True)
class Measured:
    """Numbers of n planted eyes; maps are of all tokens [n, N]."""

    maps: Mapping[Key, np.ndarray]
    auprc: Mapping[Key, np.ndarray]  # [n]; also (BRIGHTNESS, ""), (PLACE, "")
    chance: np.ndarray  # [n]
    deletion: Mapping[str, np.ndarray]  # method or order -> mean loss of the head's output [n]
    auroc: Mapping[str, float]  # arm -> planted eyes against the others


def measure(
    cfg: Config,
    store: PreparedStore,
    arms: tuple[Arm, ...],
    methods: Sequence[str],
    eyes: Eyes,
    num_outputs: int,
    runtime: Runtime,
) -> Measured:
    """Score the maps of evidence.methods_of of every arm on every eye; of the first alone no deletion."""
    weights_C = against_others(eyes.target, num_outputs).to(runtime.device)
    maps: dict[Key, list[np.ndarray]] = {}
    margins: dict[str, list[float]] = {arm.name: [] for arm in arms}
    losses: dict[str, list[float]] = {}
    bright = []
    rows = np.concatenate([eyes.rows, eyes.others])
    batches = evaluation_batches(cfg, store, rows, 1)
    for number, batch in enumerate(track(batches, len(rows), "explain", "eyes")):
        on_device = runtime.to_device(batch)
        view, valid_1N = plain_view(on_device), on_device["context_valid"]
        for group in by_encoder(arms):
            with torch.no_grad(), runtime.autocast():
                tokens_BNE = group[0].encoder(view).float()
            for arm in group:
                with torch.no_grad():
                    margin = outputs_of(arm, tokens_BNE, valid_1N).float() @ weights_C
                margins[arm.name].append(float(margin))
                if number < len(eyes.rows):
                    one = cheap_map(arm, tokens_BNE, valid_1N, weights_C)[0]
                    maps.setdefault((arm.name, methods[0]), []).append(one.numpy())
            if number < len(eyes.rows) and OCCLUSION in methods:
                hidden = occlusion_maps(group[0].encoder, group, view, valid_1N, weights_C, cfg, runtime)
                for arm, one in zip(group, hidden, strict=True):
                    maps.setdefault((arm.name, OCCLUSION), []).append(one.numpy())
        if number < len(eyes.rows):
            bright.append(_brightness(batch["volume"], cfg))
            if OCCLUSION not in methods:
                continue
            ranks = {name: many[-1] for (arm, name), many in maps.items() if arm == TRAINED}
            ranks |= {control_order(name): maps[RANDOM_HEAD, name][-1] for name in methods}
            orders = _orders(ranks, eyes, number, cfg.seed)
            for name, loss in _losses(arms[0], orders, view, valid_1N, weights_C, cfg, runtime).items():
                losses.setdefault(name, []).append(loss)
    stacked = {key: np.array(many) for key, many in maps.items()}
    plain = {(BRIGHTNESS, ""): np.array(bright), (PLACE, ""): usual_place(eyes)}
    is_planted = np.arange(len(rows)) < len(eyes.rows)
    spread = float(np.std(margins[TRAINED])) or 1.0
    return Measured(
        stacked,
        {key: auprc_of(many, eyes) for key, many in {**stacked, **plain}.items()},
        np.array([truth[valid].mean() for truth, valid in zip(eyes.truth, eyes.valid, strict=True)]),
        {name: np.array(values) / spread for name, values in losses.items()},
        {name: float(roc_auc_score(is_planted, values)) for name, values in margins.items()}
        if len(eyes.others)
        else {},
    )


def control_order(method: str) -> str:
    """The order of a method's map of a head of random weights, in which the head's own output is deleted."""
    return f"{method} of random weights"


def auprc_of(maps_nN: np.ndarray, eyes: Eyes) -> np.ndarray:
    """Average precision of a map of each eye against its planted tokens, among its valid tokens [n]."""
    return np.array(
        [
            average_precision_score(truth[valid], values[valid])
            for values, truth, valid in zip(maps_nN, eyes.truth, eyes.valid, strict=True)
        ]
    )


def usual_place(eyes: Eyes) -> np.ndarray:
    """For every eye the share of other people's eyes whose change is in each token [n, N]."""
    shares = [eyes.truth[eyes.person != person].mean(axis=0) for person in eyes.person]
    return np.array(shares)


def _brightness(volume_1DHW: Tensor, cfg: Config) -> np.ndarray:
    """The mean grey value of every token [N]."""
    d, h, w = cfg.spatial.patch_size
    grey = volume_1DHW[0].float().numpy()
    return reduce(grey, "(gd d) (gh h) (gw w) -> (gd gh gw)", "mean", d=d, h=h, w=w)


def _orders(maps: Mapping[str, np.ndarray], eyes: Eyes, number: int, seed: int) -> dict[str, np.ndarray]:
    """The valid tokens of an eye in the order in which each map hides them."""
    tokens = np.random.default_rng([seed, number]).permutation(np.flatnonzero(eyes.valid[number]))
    ranks = dict(maps) | {TRUTH_ORDER: eyes.truth[number].astype(float)}
    orders = {name: tokens[np.argsort(-values[tokens], kind="stable")] for name, values in ranks.items()}
    return orders | {RANDOM_ORDER: tokens}


def _losses(
    arm: Arm,
    orders: Mapping[str, np.ndarray],
    view: Tensor,
    valid_1N: Tensor,
    weights_C: Tensor,
    cfg: Config,
    runtime: Runtime,
) -> dict[str, float]:
    """What the explained output loses on average over SHARES, for each order."""
    sets = [np.zeros(valid_1N.shape[1], bool)]
    sets += [hidden for order in orders.values() for hidden in hidden_sets(order, valid_1N.shape[1])]
    hidden_KN = torch.from_numpy(np.array(sets))
    outputs = hidden_outputs(arm.encoder, [arm], view, valid_1N, hidden_KN, cfg, runtime)[0]
    explained = (outputs @ weights_C.float().cpu()).numpy()
    losses = (explained[0] - explained[1:]).reshape(len(orders), len(SHARES)).mean(axis=1)
    return dict(zip(orders, losses.tolist(), strict=True))


def hidden_sets(order: np.ndarray, num_tokens: int) -> Sequence[np.ndarray]:
    """The first tokens of an order, bool [N] for each of SHARES; one token or more."""
    sets = []
    for share in SHARES:
        hidden = np.zeros(num_tokens, bool)
        hidden[order[: max(1, round(share * len(order)))]] = True
        sets.append(hidden)
    return sets
