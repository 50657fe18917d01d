"""Same eye, many scanners: `python -m finetuning.evaluate --same-eye`, with --config as for a checkpoint, or
with --head.

In: a checkpoint of pretraining.train, or a head; a store in which several devices have photographed an eye.
Out: `${run.dir}/same_eye.json`, same_eye.md and a printed table: how often the nearest volume is the same eye
on another device (measures.py), for the encoder and for random initialisation, with pooled features as they
are and less the mean of their device over the training volumes; of a head the ICC of every output over
devices. Features are standardised on the training volumes. Intervals resample participants; neighbours stay.
People that training saw are an error. A new answer is a look at the test participants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler

from data_setup.store.reader import PreparedStore
from finetuning.answers.answer import Answer, Content, estimated, looks, protocol_of
from finetuning.cohort.cohort import TRAIN, Cohort, count_seen, seen_by_head
from finetuning.cohort.ledger import digest, look_at
from finetuning.cohort.metrics import interval
from finetuning.cohort.source import check_fit, evaluated_config
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.pooled import pretrained_encoder, random_encoder
from finetuning.heads.head_file import Head, open_head, predict_rows, require_same_grid
from finetuning.same_eye.eyes import Eyes, choose_eyes
from finetuning.same_eye.measures import icc, nearest
from models.probes import intervals
from models.probes.intervals import interval95, participant_draws
from models.probes.tokens import less_protocol_mean
from utils.checkpoint import load_checkpoint
from utils.config.load import storage_options_of
from utils.config.schema import Config
from utils.runtime.open import open_runtime
from utils.tables import Table, estimate, number, page

FORMAT_VERSION = 2
AS_IS, LESS_DEVICE = "as they are", "less the device's mean"


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
    """Count this look at test participants; None where none are evaluated."""
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
        require_same_grid(head, store)
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
        values = KeptFeatures(module, cfg, store, runtime, features_folder(cfg)).pooled(eyes.rows)
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
    """The same of a head: its encoder, and what it predicts."""
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
