"""Do several devices agree about one eye: of an encoder's features, and of a head's outputs.

    python -m benchmarks.same_eye --config runs/smoke_test/config.yaml
    python -m benchmarks.same_eye --head RUN

In: a checkpoint of pretraining.train, or a head of finetuning.train; a store in which several devices have
photographed an eye.
Out: `${run.dir}/same_eye.json`, same_eye.md and a printed table: how often the nearest volume is the same eye
on another device, for the encoder and for random initialisation, with pooled features as they are and less
the mean of their device over the training volumes; of a head the ICC of every output over devices. Features
are standardised on the training volumes. Intervals resample participants; neighbours stay. People that
training saw are an error. A new answer is a look at the test participants.

The evaluated people are those of eval.split. Of the volumes of an eye on one device that pass the data.*
filters one counts: that of the protocol which most evaluated eyes have on this device (of equals one of the
macula, then the first by name), so a device stands for one protocol. The training volumes are of the same
protocols, of split train.

Robustness index: Koemen et al. 2025 (arXiv:2507.17845, after de Jong et al., arXiv:2501.18055),
SO / (SO + OS), with one neighbour: of the same eye on another device (SO) and other eyes on the same device
(OS), which is nearest by cosine. The fellow eye is no neighbour: it shares much of the anatomy.

Intraclass correlation: Shrout and Fleiss 1979, of single measurements: ICC(2,1), agreement (devices are a
sample of devices; an offset between them counts as disagreement), and ICC(3,1), consistency (it does not).
"""

from __future__ import annotations

from finetuning.cohort.labels import parse_config_or_head
from utils.cli import answer_early, run_cli

if __name__ == "__main__":  # torch takes seconds to import
    answer_early("benchmarks.same_eye", __doc__ or "", parse_config_or_head)

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.preprocessing import StandardScaler

from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.answers.evaluation import find_checkpoint
from finetuning.answers.scorecard import Answer, Content, estimated, looks, protocol_of
from finetuning.cohort.cohort import EVALUATED, TRAIN, Cohort, count_seen, seen_by_head
from finetuning.cohort.labels import units_of
from finetuning.cohort.ledger import digest, look_at
from finetuning.cohort.metrics import icc, interval
from finetuning.cohort.source import check_fit, evaluated_config
from finetuning.features.kept import KeptFeatures, pretrained_encoder, random_encoder
from finetuning.heads.head_file import Head, open_head, predict_rows, require_same_grid
from models.probes import intervals
from models.probes.intervals import interval95, participant_draws
from models.probes.tokens import less_protocol_mean
from utils.checkpoint import load_checkpoint
from utils.config.load import load_config, storage_options_of
from utils.config.schema import Config
from utils.errors import ConfigError, UserError
from utils.log import setup_logging
from utils.runtime.open import open_runtime
from utils.tables import Table, estimate, number, page

MIN_EYES = 2
TRAIN_VOLUMES = 256  # at most, drawn by the seed
log = logging.getLogger(__name__)
FORMAT_VERSION = 2
AS_IS, LESS_DEVICE = "as they are", "less the device's mean"


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


@dataclass(frozen=True)
class Eyes:
    """Volumes of TRAIN, and of EVALUATED at most one for each eye and device, each eye on two or more."""

    rows: np.ndarray  # store rows [n]
    fold: np.ndarray  # TRAIN or EVALUATED [n]
    person: np.ndarray  # str [n]
    eye: np.ndarray  # str [n]: PERSON_L or PERSON_R
    device: np.ndarray  # str [n]
    protocol_of: dict[str, str]  # device -> protocol

    @property
    def evaluated(self) -> np.ndarray:
        return self.fold == EVALUATED

    def complete(self) -> tuple[np.ndarray, np.ndarray]:
        """Places [eyes, devices] in the evaluated volumes of the eyes that every device has; their people."""
        place = pd.Series(np.arange(int(self.evaluated.sum())))
        columns = (self.eye[self.evaluated], self.device[self.evaluated])
        table = place.groupby(list(columns)).first().unstack().dropna()
        person = dict(zip(self.eye.tolist(), self.person.tolist(), strict=True))
        return table.to_numpy(np.int64), np.array([person[eye] for eye in table.index], str)


def choose_eyes(cfg: Config, store: PreparedStore) -> Eyes:
    """The volumes that are compared; UserError where fewer than two eyes have two devices each."""
    if cfg.eval.protocol == "crossfit":
        raise ConfigError("eval.protocol: expected official, found crossfit")
    index = store.index.loc[store.kept]
    index = select_wanted(cfg, index[index["listed"]])
    index = index.assign(eye=units_of(index, "eye"))
    index = index[index["eye"].notna() & (index["device"].fillna("") != "")]
    protocol_of = _protocols(index[index["split"] == cfg.eval.split])
    index = index[index["protocol"] == index["device"].map(protocol_of)]
    asked = index[index["split"] == cfg.eval.split].sort_values("path")
    once = asked.drop_duplicates(["eye", "device"]).sort_index()
    paired = once[once.groupby("eye")["device"].transform("size") >= 2]
    if paired["eye"].nunique() < MIN_EYES:
        raise UserError(
            f"{store.url}: split {cfg.eval.split}: expected {MIN_EYES} eyes or more that two devices have "
            f"photographed, found {paired['eye'].nunique()} among {asked['eye'].nunique()}; the phantom has "
            "them with --every-device"
        )
    log.info(
        "%d volumes of %d eyes; %d others of the same eye and device, or of only one device, are left out",
        len(paired), paired["eye"].nunique(), len(asked) - len(paired),
    )  # fmt: skip
    train = index[index["split"] == "train"]
    if not len(train):
        raise UserError(f"{store.url}: expected volumes of split train, found none")
    drawn = np.random.default_rng(cfg.seed).permutation(len(train))[:TRAIN_VOLUMES]
    parts = [train.iloc[np.sort(drawn)], paired]
    whole = pd.concat(parts)
    person, eye, device = (whole[name].to_numpy(str) for name in ("person_id", "eye", "device"))
    fold = np.repeat([TRAIN, EVALUATED], [len(part) for part in parts])
    return Eyes(whole.index.to_numpy(), fold, person, eye, device, protocol_of)


def _protocols(index: pd.DataFrame) -> dict[str, str]:
    """Device -> the protocol that most eyes have on it; of equals one of the macula, then the first."""
    chosen = {}
    for device, part in index.groupby("device"):
        eyes = part.groupby("protocol")["eye"].nunique()
        region = part.groupby("protocol")["region"].first().fillna("")
        chosen[str(device)] = str(
            min(eyes.index, key=lambda p: (-eyes[p], not region[p].startswith("Macula"), p))
        )
    return chosen


def draws_of(eyes: Eyes, person: np.ndarray, seed: int) -> np.ndarray:
    """How often a resample of the evaluated participants has each of these rows [S, rows]."""
    people = np.unique(eyes.person[eyes.evaluated])
    draws_SP = participant_draws(len(people), intervals.BOOTSTRAP_SAMPLES, seed)
    return draws_SP[:, np.searchsorted(people, person)]


def robustness(eyes: Eyes, features_nF: np.ndarray, seed: int) -> dict[str, Any]:
    """The index with its interval, and what it is in random order."""
    at = eyes.evaluated
    scaler = StandardScaler().fit(features_nF[eyes.fold == TRAIN].astype(np.float64))
    standard = scaler.transform(features_nF[at].astype(np.float64))
    close = nearest(standard, eyes.eye[at], eyes.person[at], eyes.device[at])
    draws = draws_of(eyes, eyes.person[at][close.counted], seed)
    drawn = draws.sum(axis=1)
    ci95 = interval95((draws @ close.same_eye)[drawn > 0] / drawn[drawn > 0])
    index = estimated(float(close.same_eye.mean()), ci95)
    return {"robustness": index, "robustness_chance": float(close.chance.mean())}


def agreement(eyes: Eyes, values_nQ: np.ndarray, names: Sequence[str], seed: int) -> dict[str, Any]:
    """ICC of quantities of the evaluated volumes over the eyes that every device has, and their mean."""
    place_ND, person = eyes.complete()
    draws = np.concatenate([np.ones((1, len(person)), np.int64), draws_of(eyes, person, seed)])
    draws = draws[(draws > 0).sum(axis=1) > 1]
    both_Q2S = np.array([icc(values_nQ[place_ND, number], draws) for number in range(len(names))])
    both_Q2S[~np.isfinite(both_Q2S)] = np.nan  # a quantity that does not vary has none
    result: dict[str, Any] = {"eyes": len(person), "each": {name: {} for name in names}}
    for kind, each_QS in zip(("icc_agreement", "icc_consistency"), both_Q2S.swapaxes(0, 1), strict=True):
        mean = each_QS.mean(axis=0)
        result[kind] = estimated(mean[0], interval(mean[1:]))
        for name, values in zip(names, each_QS, strict=True):
            result["each"][name][kind] = estimated(values[0], None)["value"]
    return result


def _look(cfg: Config, store: PreparedStore, eyes: Eyes, checksum: str, arms: Sequence[str]) -> int | None:
    if cfg.eval.split != "test":
        return None
    nothing, devices = np.zeros((len(eyes.rows), 1)), tuple(np.unique(eyes.device).tolist())
    shown = Cohort("same_eye", devices, eyes.rows, eyes.fold, nothing, eyes.rows.astype(str), eyes.person)
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
        require_same_grid(head.state, head.url, store)
        encoder, checksum = head.encoder, head.checksum
        seen = [person for ids in seen_by_head(cfg, head.state).values() for person in ids]
    eyes = choose_eyes(cfg, store)
    overlap = count_seen(cfg, eyes.person[eyes.evaluated].tolist(), {"training": seen}, url)
    columns = ["checksum", "device", "protocol"]
    volumes = store.index.loc[eyes.rows, columns].astype(str).to_numpy().tolist()
    facts = [FORMAT_VERSION, checksum, protocol_of(cfg), volumes, eyes.fold.tolist(), eyes.eye.tolist()]
    answer = Answer(cfg.run.dir, "same_eye", digest(facts))
    if (known := answer.known()) is not None:
        return known
    first = "pre-trained encoder (EMA target)" if head is None else "the head's encoder"
    arms = {first: encoder, f"random initialisation (seed {cfg.seed})": random_encoder(cfg, cfg.seed)}
    rows = []
    for label, module in arms.items():
        values = KeptFeatures(module, cfg, store, runtime).pooled(eyes.rows)
        centred = less_protocol_mean(values, eyes.device, eyes.fold == TRAIN)
        for form, table in ((AS_IS, values), (LESS_DEVICE, centred)):
            rows.append({"label": label, "features": form, **robustness(eyes, table, cfg.seed)})
    result: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "url": url,
        "sha256": checksum,
        "split": cfg.eval.split,
        "synthetic": bool(store.attrs["synthetic"]),
        "n_participants": len(np.unique(eyes.person[eyes.evaluated])),
        "n_eyes": len(np.unique(eyes.eye[eyes.evaluated])),
        "n_volumes": int(eyes.evaluated.sum()),
        "overlap": overlap,
        "protocols": eyes.protocol_of,
        "rows": rows,
    }
    if head is not None:
        scores = predict_rows(head, store, eyes.rows[eyes.evaluated], runtime)
        names = head.names if scores.shape[1] == len(head.names) else (head.cfg.task.label_column,)
        result["head"] = agreement(eyes, scores, names, cfg.seed)
    result["look"] = _look(cfg, store, eyes, checksum, list(arms))
    return answer.write(result, markdown(result))


def same_eye_of_head(wanted: str, overrides: Sequence[str]) -> Content:
    head = open_head(wanted, storage_options_of(overrides))
    cfg = evaluated_config(head.cfg, head.url, overrides)
    return same_eye(cfg, head.url, replace(head, cfg=cfg))


def markdown(result: Content) -> str:
    """same_eye.md: who was compared, robustness, the outputs of a head."""
    protocols = ", ".join(f"{device} ({protocol})" for device, protocol in result["protocols"].items())
    lines = [
        f"{result['n_volumes']} volumes of {result['n_eyes']} eyes of {result['n_participants']} "
        f"participants of split {result['split']}; devices: {protocols}.",
        *(["A phantom: it says nothing about real retinas."] if result["synthetic"] else []),
    ]
    note = (
        "Of the same eye on another device and other eyes on the same device: how often the former is "
        "nearest. 1: only the eye; 0: only the device; in random order "
        f"{number(result['rows'][0]['robustness_chance'])}."
    )
    rows = [[row["label"], row["features"], estimate(row["robustness"])] for row in result["rows"]]
    tables = [Table("Robustness index", ["features", "form", "index (95 %)"], rows, note)]
    if "head" in result:
        head, kinds = result["head"], ("icc_agreement", "icc_consistency")
        rows = [[name, *(number(each[kind]) for kind in kinds)] for name, each in head["each"].items()]
        rows.append(["mean", *(estimate(head[kind]) for kind in kinds)])
        note = f"Over the {head['eyes']} eyes that every device has."
        tables.append(
            Table("Outputs of the head", ["output", "ICC(2,1) (95 %)", "ICC(3,1) (95 %)"], rows, note)
        )
    return page("Same eye, many scanners", lines, looks(result), tables)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the devices by a checkpoint or a head and print the page."""
    asked = parse_config_or_head("benchmarks.same_eye", __doc__ or "", argv)
    setup_logging()
    if asked.head is not None:
        result = same_eye_of_head(asked.head, asked.overrides)
    else:
        cfg = load_config(asked.config, asked.overrides)
        result = same_eye(cfg, find_checkpoint(cfg))
    print(markdown(result))


if __name__ == "__main__":
    run_cli(main)
