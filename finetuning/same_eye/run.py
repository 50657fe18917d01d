"""Same eye, many scanners: `python -m finetuning.evaluate --same-eye`, with --config as for a checkpoint, or
with --head.

In: a checkpoint of pretraining.train, or a head; a store in which several devices have photographed an eye.
Out: `${run.dir}/same_eye.json`, same_eye.md and a printed table. For each encoder, with its pooled features
as they are and less the mean of their device over the training fold:
    robustness  is the nearest volume the same eye on another device (measures.py: nearest)
    device      balanced accuracy of a logistic probe for the device
    thickness   (a phantom) R2 of layer thickness by ridge, and the ICC of what it predicts over devices
and the ICC of every output of a head. Rows beside them: only the device (planted: must be 0), random
initialisation, and on a phantom the truth. Features are standardised on the training fold. Intervals
resample participants; neighbours stay. People that training saw are an error, as in finetuning.evaluate.
A new answer is a look at the test participants (finetuning/cohort/ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler

from data_setup.phantom.truth import read_truth_file
from data_setup.store.reader import PreparedStore
from finetuning.answers.answer import Answer, Content, protocol_of
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort, count_seen, seen_by_head
from finetuning.cohort.ledger import digest, look_at
from finetuning.cohort.source import check_fit, evaluated_config
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.pooled import pretrained_encoder, random_encoder
from finetuning.features.probing import read_by_fold
from finetuning.heads.head_file import Head, open_head, predict_rows, require_same_grid
from finetuning.same_eye.eyes import Eyes, choose_eyes
from finetuning.same_eye.measures import icc, nearest
from finetuning.same_eye.page import markdown
from models.probes import intervals
from models.probes.intervals import interval95, participant_draws
from models.probes.participants import Fold, fit_logistic
from models.probes.tokens import less_protocol_mean, mean_r2, mean_r2_draws
from utils.checkpoint import load_checkpoint
from utils.config.load import storage_options_of
from utils.config.schema import Config
from utils.runtime.open import open_runtime

FORMAT_VERSION = 1
AS_IS, LESS_DEVICE = "as they are", "less the device's mean"
PLANTED, TRUTH = "only the device (planted)", "layer thickness, the truth"


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
    draws = participant_draws(len(people), intervals.BOOTSTRAP_SAMPLES, cfg.seed)
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
    prediction = read_by_fold(features_nF, truth_nL, asked.eyes.person, asked.eyes.fold)
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


def _answer(cfg: Config, store: PreparedStore, eyes: Eyes, checksum: str) -> Answer:
    """same_eye.json: it depends on checkpoint or head, protocol, volumes, folds and people."""
    volumes = store.index.loc[eyes.rows, ["checksum", "device", "protocol"]].astype(str).to_numpy().tolist()
    table = [volumes, eyes.fold.tolist(), eyes.eye.tolist()]
    facts = [FORMAT_VERSION, checksum, protocol_of(cfg), cfg.data.gcs_root, table]
    return Answer(cfg.run.dir, "same_eye", digest(facts))


def _look(cfg: Config, store: PreparedStore, eyes: Eyes, checksum: str, arms: Sequence[str]) -> int | None:
    """Count this look at test participants; None where none are evaluated."""
    if cfg.eval.split != "test":
        return None
    nothing, devices = np.zeros((len(eyes.rows), 1)), tuple(np.unique(eyes.device).tolist())
    volumes = eyes.rows.astype(str)
    shown = Cohort("same_eye", devices, eyes.rows, eyes.fold, nothing, volumes, eyes.person)
    what = f"same_eye: {', '.join(arms)}"
    return look_at(store, [shown], checksum, ["same_eye", cfg.eval.split], what)


def same_eye(cfg: Config, url: str, head: Head | None = None) -> Content:
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
        seen = [person for ids in seen_by_head(cfg, head.state).values() for person in ids]
    eyes = choose_eyes(cfg, store)
    overlap = count_seen(cfg, eyes.person[eyes.evaluated].tolist(), {"training": seen}, url)
    answer = _answer(cfg, store, eyes, checksum)
    if (known := answer.known()) is not None:
        return known
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
    result["look"] = _look(cfg, store, eyes, checksum, list(arms))
    return answer.write(result, markdown(result))


def same_eye_of_head(wanted: str, overrides: Sequence[str]) -> Content:
    """The same of a head: its encoder, and what it predicts."""
    head = open_head(wanted, storage_options_of(overrides))
    cfg = evaluated_config(head.cfg, head.url, overrides)
    return same_eye(cfg, head.url, replace(head, cfg=cfg))
