"""Same eye, many scanners: `python -m finetuning.evaluate --same-eye`, with --config as for a checkpoint, or
with --head.

In: a checkpoint of pretraining.train, or a head; a store in which several devices have photographed an eye.
Out: `${run.dir}/same_eye.json`, same_eye.md and a printed table. For each encoder, with its pooled features
as they are and less the mean of their device over the training fold:
    robustness  is the nearest volume the same eye on another device (measures.py: nearest)
    device      balanced accuracy of a logistic probe for the device
    thickness   (a phantom) R2 of layer thickness by ridge, and the ICC of what it predicts over devices
and the ICC of every output of a head. Rows beside them: the device alone (planted: must be 0), random
initialisation, and on a phantom the truth. Features are standardised on the training fold. Intervals
resample participants; neighbours stay. People that training saw are an error, as in finetuning.evaluate. Each
run is a look at the test participants (finetuning/cohort/ledger.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler

from data_setup.phantom.truth import read_truth_file
from data_setup.store.reader import PreparedStore
from finetuning.cohort import source
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.cohort.source import check_fit, evaluated_config
from finetuning.dense.folds import DenseVolumes, count_look
from finetuning.dense.head import require_same_grid
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.pooled import pretrained_encoder, random_encoder
from finetuning.heads.head_file import Head, open_head, predict_rows
from finetuning.same_eye.eyes import Eyes, choose_eyes
from finetuning.same_eye.measures import icc, nearest
from finetuning.same_eye.page import markdown
from models.probes.intervals import interval95, participant_draws
from models.probes.participants import Fold, fit_logistic
from models.probes.tokens import Rows, less_protocol_mean, mean_r2, mean_r2_draws, ridge_rows
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.cli import parse_words
from utils.config.load import load_config, storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.help_pages import Parser
from utils.runtime.open import open_runtime

FORMAT_VERSION = 1
AS_IS, LESS_DEVICE = "as they are", "less the device's mean"
PLANTED, TRUTH = "the device alone (planted)", "layer thickness, the truth"


@dataclass(frozen=True)
class Asked:
    """What every row of the table shares."""

    cfg: Config
    eyes: Eyes
    draws_SP: np.ndarray  # resamples of the evaluated participants, sorted by id
    people: np.ndarray  # str [P]
    thickness: (
        np.ndarray | None
    )  # of a phantom [n, L] um, less the mean of the training volumes of a protocol
    layers: tuple[str, ...]

    def draws_of(self, person: np.ndarray) -> np.ndarray:
        """How often a resample has each of these rows [S, rows]."""
        return self.draws_SP[:, np.searchsorted(self.people, person)]


def ask(cfg: Config, store: PreparedStore, eyes: Eyes) -> Asked:
    """Resamples, and the truth of a phantom."""
    people = np.unique(eyes.person[eyes.evaluated])
    draws = participant_draws(len(people), cfg.probe.bootstrap_samples, cfg.seed)
    if not store.attrs["synthetic"]:
        return Asked(cfg, eyes, draws, people, None, ())
    files = [
        read_truth_file(cfg.data.gcs_root, store.index.loc[row], cfg.data.storage_options)
        for row in eyes.rows.tolist()
    ]
    values = np.array([file["layer_thickness_um"] for file in files], np.float64)
    layers = tuple(files[0]["layer_names"].tolist())
    # a device has one protocol: the fields differ, and with them the mean thickness
    values = less_protocol_mean(values, eyes.device, eyes.fold == TRAIN)
    return Asked(cfg, eyes, draws, people, values, layers)


def score(asked: Asked, features_nF: np.ndarray) -> dict[str, Any]:
    """Robustness, the device that a probe reads, and on a phantom thickness, of one table of features."""
    eyes, at = asked.eyes, asked.eyes.evaluated
    scaler = StandardScaler().fit(features_nF[eyes.fold == TRAIN].astype(np.float64))
    standard = scaler.transform(features_nF[at].astype(np.float64))
    close = nearest(standard, eyes.eye[at], eyes.person[at], eyes.device[at])
    draws = asked.draws_of(eyes.person[at][close.counted])
    drawn = draws.sum(axis=1)
    result: dict[str, Any] = {
        "robustness": float(close.same_eye.mean()),
        "robustness_ci95": list(interval95((draws @ close.same_eye)[drawn > 0] / drawn[drawn > 0])),
        "robustness_chance": float(close.chance.mean()),
        "nearest_of_all": close.kinds,
        "device_balanced_accuracy": _device(eyes, features_nF),
    }
    if asked.thickness is not None:
        result["thickness"] = _thickness(asked, features_nF, asked.thickness)
    return result


def _device(eyes: Eyes, features_nF: np.ndarray) -> float | None:
    """Balanced accuracy over evaluated volumes of a logistic probe for the device; None where the training
    fold lacks one of their devices.
    """
    names = np.unique(eyes.device[eyes.evaluated])
    known = np.isin(eyes.device, names)
    number = np.searchsorted(names, np.where(known, eyes.device, names[0]))
    unit = np.char.add(np.char.add(eyes.person, "_"), eyes.device)
    train, val, test = (
        Fold(features_nF[chosen], number[chosen], unit[chosen])
        for chosen in (known & (eyes.fold == fold) for fold in (TRAIN, VAL, EVALUATED))
    )
    if set(train.labels.tolist()) != set(range(len(names))):
        return None
    scores = fit_logistic(train, val).score(test.features)
    return float(np.mean([(scores.argmax(axis=1) == d)[test.labels == d].mean() for d in range(len(names))]))


def _thickness(asked: Asked, features_nF: np.ndarray, truth_nL: np.ndarray) -> dict[str, Any]:
    """R2 of layer thickness by ridge, and the ICC over devices of what it predicts, mean over layers."""
    train, val, test = (
        Rows(features_nF[chosen], truth_nL[chosen], asked.eyes.person[chosen])
        for chosen in (asked.eyes.fold == fold for fold in (TRAIN, VAL, EVALUATED))
    )
    prediction = ridge_rows(train, val, test)
    draws = mean_r2_draws(prediction.errors, asked.draws_SP)
    r2 = {"r2": mean_r2(prediction.errors), "r2_ci95": list(interval95(draws))}
    return r2 | agreement(asked, prediction.predicted, asked.layers)


def agreement(asked: Asked, values_nQ: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """ICC of quantities of the evaluated volumes over the eyes that every device has, and their mean."""
    place_ND, person = asked.eyes.complete()
    draws = np.concatenate([np.ones((1, len(person)), np.int64), asked.draws_of(person)])
    draws = draws[(draws > 0).sum(axis=1) > 1]
    by_name = {name: icc(values_nQ[place_ND, number], draws) for number, name in enumerate(names)}
    result: dict[str, Any] = {"eyes": len(person), "each": {}}
    for number, kind in enumerate(("icc_agreement", "icc_consistency")):
        each = np.stack([values[number] for values in by_name.values()])
        mean = each.mean(axis=0)
        result[kind] = _finite(mean[0])
        result[f"{kind}_ci95"] = (
            list(interval95(mean[1:][np.isfinite(mean[1:])])) if np.isfinite(mean[0]) else None
        )
        for name, values in zip(names, each, strict=True):
            result["each"].setdefault(name, {})[kind] = _finite(values[0])
    return result


def _finite(value: float) -> float | None:
    """JSON has no NaN: a quantity that does not vary has no ICC."""
    return float(value) if np.isfinite(value) else None


def measure(asked: Asked, arms: dict[str, Callable[[], np.ndarray]]) -> list[dict[str, Any]]:
    """A row for each arm, each with its features as they are and less the device's mean."""
    rows = []
    for label, features in arms.items():
        values = features()
        centred = less_protocol_mean(values, asked.eyes.device, asked.eyes.fold == TRAIN)
        for form, table in ((AS_IS, values), (LESS_DEVICE, centred)):
            if label not in (PLANTED, TRUTH) or form == AS_IS:  # nothing is left, or it is so already
                rows.append({"label": label, "features": form, **score(asked, table)})
    return rows


def same_eye(cfg: Config, url: str, head: Head | None = None) -> dict[str, Any]:
    """The content of same_eye.json of the checkpoint at `url`, or of a head whose configuration is `cfg`."""
    runtime = open_runtime(cfg.train.use_bf16)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    if head is None:
        state = load_checkpoint(url, cfg.data.storage_options)
        check_fit(cfg, store, state, url)
        encoder, checksum, seen = (
            pretrained_encoder(cfg, state, url),
            state["checksum"],
            state["participants"],
        )
    else:
        require_same_grid(head, store)
        encoder, checksum = head.encoder, head.checksum
        seen = [*head.state["participants"]["train"], *head.state["pretraining_participants"]]
        if cfg.eval.split != "val":  # whom the head was chosen on
            seen += head.state["participants"]["val"]
    eyes = choose_eyes(cfg, store)
    overlap = _overlap(cfg, eyes, seen, url)
    asked = ask(cfg, store, eyes)

    def of(module: Any) -> Callable[[], np.ndarray]:
        folder = features_folder(cfg)
        return lambda: KeptFeatures(module, cfg, store, runtime, folder).pooled(eyes.rows)

    first = "pre-trained encoder (EMA target)" if head is None else "the head's encoder"
    arms = {first: of(encoder), f"random initialisation (seed {cfg.seed})": of(random_encoder(cfg, cfg.seed))}
    devices = np.unique(eyes.device)
    arms[PLANTED] = lambda: (eyes.device[:, None] == devices).astype(np.float64)
    if asked.thickness is not None:
        thickness = asked.thickness
        arms[TRUTH] = lambda: thickness
    result: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "url": url,
        "sha256": checksum,
        "split": cfg.eval.split,
        "synthetic": bool(store.attrs["synthetic"]),
        "n_participants": len(asked.people),
        "n_eyes": len(np.unique(eyes.eye[eyes.evaluated])),
        "n_volumes": int(eyes.evaluated.sum()),
        "n_complete_eyes": len(eyes.complete()[1]),
        "overlap": overlap,
        "protocols": eyes.protocol_of,
        "rows": measure(asked, arms),
    }
    if head is not None:
        scores = predict_rows(head, store, eyes.rows[eyes.evaluated], runtime)
        names = head.names if scores.shape[1] == len(head.names) else (head.cfg.task.label_column,)
        result["head"] = agreement(asked, scores, names)
    shown = DenseVolumes(store, eyes.rows, eyes.fold, eyes.person, tuple(devices.tolist()))
    result["look"] = count_look(cfg, shown, checksum, list(arms), "same_eye")
    storage.write_text(
        storage.join(cfg.run.dir, "same_eye.json"), json.dumps(result, indent=1, allow_nan=False) + "\n"
    )
    storage.write_text(storage.join(cfg.run.dir, "same_eye.md"), markdown(result) + "\n")
    return result


def _overlap(cfg: Config, eyes: Eyes, seen: Sequence[str], url: str) -> int:
    """How many evaluated participants were seen in training; UserError unless that is 0 or allowed."""
    shared = np.intersect1d(eyes.person[eyes.evaluated], list(seen))
    if len(shared) and not cfg.eval.allow_overlap:
        raise UserError(
            f"{url}: expected no participant of split {cfg.eval.split} in its training, found {len(shared)} "
            f"({', '.join(shared[:3])}); eval.allow_overlap=true evaluates them all the same, and the table "
            "says so"
        )
    return len(shared)


def main(words: Sequence[str], find_checkpoint: Callable[[Config], str]) -> None:
    """Compare what --config and --checkpoint, or --head, mean, and print the page.

    `find_checkpoint`: that of finetuning.evaluate.
    """
    if any(word == "--head" or word.startswith("--head=") for word in words):
        parser = Parser(prog="python -m finetuning.evaluate --same-eye")
        parser.add_argument("--same-eye", action="store_true")
        parser.add_argument("--head", required=True, metavar="FILE_OR_RUN")
        parser.add_argument("overrides", nargs="*", metavar="section.key=value")
        args = parser.parse_intermixed_args(words)
        head = open_head(args.head, storage_options_of(args.overrides))
        cfg = evaluated_config(head.cfg, head.url, args.overrides)
        print(markdown(same_eye(cfg, head.url, replace(head, cfg=cfg))))
        return
    asked = parse_words(
        "finetuning.evaluate",
        __doc__ or "",
        words,
        lambda p: p.add_argument("--same-eye", action="store_true"),
    )
    if source.is_task_file(asked.config):
        cfg = source.open_source(asked.config, asked.overrides).cfg
    else:
        cfg = load_config(asked.config, asked.overrides)
    print(markdown(same_eye(cfg, find_checkpoint(cfg))))
