"""The rows of a table before anything is computed, encoders and baselines that have none, and probes of them.

In: checkpoints, a configuration, the store, the volumes that anybody asks for; cohorts (one with the official
splits, one a fold with crossfit). Out: an `Entry` a row, whose features are computed when first asked for,
once for all volumes; `Probed`, the scores of a probe with the C that validation chose, by the protocol of
models.probes.participants. Classes: logistic; a value: ridge; several labels: a logistic probe each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from sklearn.decomposition import PCA
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.metrics import Scored
from finetuning.cohort.source import Source, check_fit, open_source
from finetuning.features.kept import (
    KeptFeatures,
    device_features,
    pretrained_encoder,
    random_encoder,
    raw_features,
)
from finetuning.features.slices import SliceEncoder
from finetuning.features.yardsticks import Volumes, Yardstick, yardsticks
from models.probes.hidden import fit_hidden_classes, fit_hidden_value
from models.probes.participants import Fitted, Fold, fit_logistic, fit_ridge, require_disjoint
from utils.config.schema import Config
from utils.errors import UserError

Features = Callable[[Cohort], np.ndarray]  # [n, F] in the order of the cohort's rows
RANDOM_SEEDS = 3  # random initialisations to compare with
MAX_COMPONENTS = 256  # of the raw-voxel PCA


@dataclass(frozen=True)
class Probed:
    """What one probe says of every volume, and how it was chosen."""

    scored: Scored
    chosen_c: float | None  # median over cohorts and labels; None: a hidden layer
    val_score: float  # their mean: balanced accuracy, or minus the squared error of a value
    num_features: int


def probe(cohorts: Sequence[Cohort], features: Features, is_hidden: bool = False) -> Probed:
    """Fit on TRAIN, choose C (of a hidden layer the step) on VAL, score all; UserError for one class."""
    scores, fitted, width = [], [], 0
    for cohort in cohorts:
        features_nF = features(cohort)
        width = features_nF.shape[1]
        parts = _fit(cohort, features_nF, is_hidden)
        scores.append(_volume_scores(cohort, parts, features_nF))
        fitted += parts
    return Probed(
        Scored(tuple(cohorts), tuple(scores)),
        None if is_hidden else float(np.median([part.chosen_c for part in fitted])),
        float(np.mean([part.val_score for part in fitted])),
        width,
    )


def of_rows(rows: np.ndarray, values_nF: np.ndarray) -> Features:
    """Features of store rows, ascending, for any cohort of them."""
    return lambda cohort: values_nF[np.searchsorted(rows, cohort.rows)]


def _fit(cohort: Cohort, features_nF: np.ndarray, is_hidden: bool) -> list[Fitted]:
    """One probe, or one a label; weights are of people, and validation pools the units of a prediction."""
    train, val, evaluated = (cohort.fold == fold for fold in (TRAIN, VAL, EVALUATED))
    require_disjoint(cohort.person[train], cohort.person[val], cohort.person[evaluated])
    linear, hidden = (
        (fit_ridge, fit_hidden_value) if cohort.kind == "regression" else (fit_logistic, fit_hidden_classes)
    )
    fit = hidden if is_hidden else linear
    parts = []
    for column in range(cohort.target.shape[1]):
        target = cohort.target[:, column]
        labels = target if cohort.kind == "regression" else target.astype(int)
        if len(np.unique(labels[train])) < 2 and cohort.kind != "regression":
            name = cohort.names[column] if cohort.kind == "multilabel" else "the label"
            raise UserError(f"{name}: expected two classes among the training participants, found one")
        parts.append(
            fit(
                Fold(features_nF[train], labels[train], cohort.person[train]),
                Fold(features_nF[val], labels[val], cohort.unit[val]),
            )
        )
    return parts


def _volume_scores(cohort: Cohort, parts: Sequence[Fitted], features_nF: np.ndarray) -> np.ndarray:
    """Scores of all volumes [n, C]: a column for every class, also for one that the training fold lacks."""
    if cohort.kind == "multilabel":
        return np.stack([part.score(features_nF)[:, 1] for part in parts], axis=1)
    scores = parts[0].score(features_nF)
    lacking = np.zeros((len(scores), cohort.num_outputs - scores.shape[1]))
    return np.concatenate([scores, lacking], axis=1)


@dataclass(frozen=True)
class Encoder:
    """A 3D encoder of this project, and what it rests on."""

    module: nn.Module
    source: Source  # a checkpoint with the same architecture
    is_random: bool


@dataclass(frozen=True)
class Entry:
    """A row: `features()` gives [n, F] of a cohort's rows; `identity` names all that these follow from.

    `encoder` gives that of a fold of crossfit: a random one may differ by fold.
    """

    name: str
    label: str
    identity: str
    features: Callable[[], Features]
    encoder: Callable[[Cohort], Encoder] | None = None  # None: nothing that could be trained further

    @property
    def is_free(self) -> bool:
        """Whether it has no encoder of this project: what a user would take instead."""
        return self.encoder is None


def lookup(volumes: Volumes, compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Features]:
    """Features of all volumes, whose rows are sorted, computed when first asked for, then read by row."""
    return cache(lambda: of_rows(volumes.rows, compute(volumes.rows)))


def open_sources(config: str, overrides: Sequence[str], checkpoints: Sequence[str]) -> list[Source]:
    """Each checkpoint with its own model, all with the data, the seed and the folder of the first."""
    sources = [open_source(config, [*overrides, f"model.checkpoint={path}"]) for path in checkpoints]
    first = sources[0].cfg
    return [
        replace(s, cfg=replace(s.cfg, data=first.data, seed=first.seed, run=first.run, train=first.train))
        for s in sources
    ]


def check_sources(sources: Sequence[Source], store: PreparedStore) -> None:
    """Raise UserError for a checkpoint that does not fit the store, or one that is named twice."""
    for source in sources:
        check_fit(source.cfg, store, source.state, source.url)
    checksums = [source.state["checksum"] for source in sources]
    for number, checksum in enumerate(checksums):
        if checksum in checksums[:number]:
            raise UserError(
                f"--checkpoints: expected different checkpoints, found the same content in "
                f"{sources[checksums.index(checksum)].url} and {sources[number].url}"
            )


def short_names(sources: Sequence[Source]) -> list[str]:
    """The folder of each run, of a bare file its name; the whole URL where two have the same."""
    parts = [source.url.split("/") for source in sources]
    folders = [words[:-2] if words[-2:-1] == ["checkpoints"] else words[:-1] for words in parts]
    names = [folder[-1] if folder else words[-1] for folder, words in zip(folders, parts, strict=True)]
    return [n if names.count(n) == 1 else s.url for n, s in zip(names, sources, strict=True)]


def encoder_entry(volumes: Volumes, source: Source, name: str, label: str, seed: int | None = None) -> Entry:
    """The target encoder of a checkpoint; with a seed a random encoder of its architecture."""

    @cache
    def encoder() -> Encoder:
        if seed is not None:
            return Encoder(random_encoder(source.cfg, seed), source, is_random=True)
        module = pretrained_encoder(source.cfg, source.state, source.url)
        return Encoder(module, source, is_random=False)

    def compute(rows: np.ndarray) -> np.ndarray:
        return kept_features(volumes, encoder()).pooled(rows)

    identity = f"random {architecture(source.cfg)} seed {seed}"
    if seed is None:
        identity = f"checkpoint {source.state['checksum']}{_blocks(source.cfg)}"
    return Entry(name, label, identity, lookup(volumes, compute), lambda cohort: encoder())


def best_random(
    volumes: Volumes,
    cohorts: Sequence[Cohort],
    source: Source,
    vals_of: Callable[[Entry], Sequence[float]],
    arm: str = "random initialisation",
) -> tuple[Entry, str]:
    """Of RANDOM_SEEDS random encoders with the architecture of a source the one that is best on validation,
    by `vals_of` it in each fold, and a note of all.

    In crossfit each fold has its own best. A mean over folds must not choose: the validation people of a fold
    are evaluated in another one.
    """
    seeds = [volumes.cfg.seed + number for number in range(RANDOM_SEEDS)]
    entries = [encoder_entry(volumes, source, f"random_{s}", f"{arm} (seed {s})", s) for s in seeds]
    vals = [list(vals_of(entry)) for entry in entries]
    best = [int(np.argmax(scores)) for scores in zip(*vals, strict=True)]
    rule, entry = "the seed that is best on validation participants", entries[best[0]]
    if len(best) > 1:
        chosen = ", ".join(str(seeds[number]) for number in best)
        rule = f"in each fold the seed that is best on the fold's own validation participants, here {chosen}"
        parts = [entries[number] for number in best]
        entry = fold_by_fold(parts, cohorts, "random_by_fold", f"{arm} (a seed a fold)")
    each = ", ".join(f"seed {seed}: {np.mean(val):.3f}" for seed, val in zip(seeds, vals, strict=True))
    return entry, f"{arm[0].upper()}{arm[1:]} is {rule} ({each})."


def fold_by_fold(parts: Sequence[Entry], cohorts: Sequence[Cohort], name: str, label: str) -> Entry:
    """In fold k of crossfit, `cohorts[k]` or a part of it, `parts[k]`: an entry with an encoder."""
    fold_of = {p: k for k, c in enumerate(cohorts) for p in c.person[c.fold == EVALUATED].tolist()}

    def of(cohort: Cohort) -> Entry:
        return parts[fold_of[str(cohort.person[cohort.fold == EVALUATED][0])]]

    def encoder(cohort: Cohort) -> Encoder:
        one = of(cohort)
        assert one.encoder is not None
        return one.encoder(cohort)

    identity = f"by fold: {'; '.join(part.identity for part in parts)}"
    return Entry(name, label, identity, lambda: lambda cohort: of(cohort).features()(cohort), encoder)


def architecture(cfg: Config) -> str:
    """What two configurations share whose random encoders are the same."""
    return f"{cfg.method.recipe} {cfg.model.size} {cfg.model.rope} {cfg.spatial}{_blocks(cfg)}"


def _blocks(cfg: Config) -> str:
    return f" blocks {cfg.model.feature_blocks}" if cfg.model.feature_blocks else ""


def plain_entries(volumes: Volumes) -> list[Entry]:
    """Rows without an encoder: raw-voxel PCA, mean A-scan profile, device one-hot."""
    store, rows = volumes.store, volumes.rows

    @cache
    def raw() -> tuple[np.ndarray, np.ndarray]:
        return raw_features(volumes.cfg, store, rows, volumes.runtime)

    def components(cohort: Cohort) -> np.ndarray:
        is_train, voxels = cohort.fold == TRAIN, of_rows(rows, raw()[0])(cohort)
        count = min(MAX_COMPONENTS, int(is_train.sum()) - 1, voxels.shape[1])
        return PCA(count, random_state=0).fit(voxels[is_train]).transform(voxels)

    def profile(cohort: Cohort) -> np.ndarray:
        return of_rows(rows, raw()[1])(cohort)

    def device(cohort: Cohort) -> np.ndarray:
        return device_features(store, cohort.rows, cohort.rows[cohort.fold == TRAIN])

    return [
        Entry("voxel_pca", "raw-voxel PCA", "voxel_pca", lambda: components),
        Entry("ascan_profile", "mean A-scan profile", "ascan_profile", lambda: profile),
        Entry("device", "device one-hot", "device", lambda: device),
    ]


def yardstick_entries(volumes: Volumes) -> list[Entry]:
    def entry(row: Yardstick) -> Entry:
        def features(cohort: Cohort) -> np.ndarray:
            assert row.volumes is not None
            is_training = np.isin(volumes.rows, cohort.rows[cohort.fold == TRAIN])
            return of_rows(volumes.rows, row.volumes(is_training))(cohort)

        return Entry(row.name, row.label, f"yardstick {row.name}", lambda: features)

    return [entry(row) for row in yardsticks(volumes.cfg, volumes.store, volumes.rows, volumes.runtime)]


def slice_entry(volumes: Volumes, encoder: SliceEncoder) -> Entry:
    """A local Hugging Face image encoder, applied to every B-scan."""

    def compute(rows: np.ndarray) -> np.ndarray:
        return encoder.embed(volumes.store, rows, volumes.runtime)

    name = encoder.folder.name
    return Entry("2d", f"2d: {name}", f"2d {encoder.digest()}", lookup(volumes, compute))


def kept_features(volumes: Volumes, encoder: Encoder) -> KeptFeatures:
    """The kept features of an encoder; a random one's are kept as well, by its weights."""
    cfg = encoder.source.cfg
    return KeptFeatures(encoder.module, cfg, volumes.store, volumes.runtime)
