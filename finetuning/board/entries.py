"""The rows of the leaderboard before anything is computed: encoders, and baselines that have none.

In: checkpoints, a configuration, the store, the volumes that anybody asks for. Out: an `Entry` a row, whose
features are computed when first asked for, once for all volumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torch import nn

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, Cohort
from finetuning.cohort.source import Source, check_fit, open_source
from finetuning.features.kept import KeptFeatures, features_folder
from finetuning.features.pooled import pretrained_encoder, random_encoder
from finetuning.features.probing import Features, baselines, of_rows
from finetuning.features.slices import SliceEncoder
from finetuning.features.yardsticks import Yardstick, yardsticks
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime


@dataclass(frozen=True)
class Encoder:
    """A 3D encoder of this project, and the configuration that it rests on."""

    module: nn.Module
    cfg: Config
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


@dataclass(frozen=True)
class Volumes:
    """Which volumes the table is about, and how they are read."""

    cfg: Config
    store: PreparedStore
    rows: np.ndarray  # store rows, sorted
    runtime: Runtime

    def lookup(self, compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Features]:
        """Features of all volumes, computed when first asked for, then read by row."""

        @cache
        def features() -> Features:
            return of_rows(self.rows, compute(self.rows))

        return features


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


def checkpoint_entry(volumes: Volumes, source: Source, name: str, label: str) -> Entry:
    """The target encoder of a checkpoint."""

    @cache
    def encoder() -> Encoder:
        return Encoder(
            pretrained_encoder(source.cfg, source.state, source.url), source.cfg, source, is_random=False
        )

    blocks = f" blocks {source.cfg.model.feature_blocks}" if source.cfg.model.feature_blocks else ""
    return _encoder_entry(volumes, encoder, name, label, f"checkpoint {source.state['checksum']}{blocks}")


def random_entry(volumes: Volumes, source: Source, seed: int, label: str) -> Entry:
    """A random encoder of the architecture of a checkpoint."""

    @cache
    def encoder() -> Encoder:
        return Encoder(random_encoder(source.cfg, seed), source.cfg, source, is_random=True)

    identity = f"random {architecture(source.cfg)} seed {seed}"
    return _encoder_entry(volumes, encoder, f"random_{seed}", label, identity)


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
    blocks = f" blocks {cfg.model.feature_blocks}" if cfg.model.feature_blocks else ""
    return f"{cfg.method.recipe} {cfg.model.size} {cfg.model.rope} {cfg.spatial}{blocks}"


def baseline_entries(volumes: Volumes) -> list[Entry]:
    """Rows without an encoder: raw-voxel PCA, mean A-scan profile, device one-hot, and strong baselines."""
    rows = baselines(volumes.cfg, volumes.store, volumes.rows, volumes.runtime)

    def entry(name: str) -> Entry:
        label, features = rows[name]
        return Entry(name, label, name, lambda: features)

    def of_yardstick(row: Yardstick) -> Entry:
        def features(cohort: Cohort) -> np.ndarray:
            assert row.volumes is not None
            is_training = np.isin(volumes.rows, cohort.rows[cohort.fold == TRAIN])
            return of_rows(volumes.rows, row.volumes(is_training))(cohort)

        return Entry(row.name, row.label, f"yardstick {row.name}", lambda: features)

    made = yardsticks(volumes.cfg, volumes.store, volumes.rows, volumes.runtime)
    return [*map(entry, rows), *map(of_yardstick, made)]


def slice_entry(volumes: Volumes, encoder: SliceEncoder) -> Entry:
    """A local Hugging Face image encoder, applied to every B-scan."""

    def compute(rows: np.ndarray) -> np.ndarray:
        return encoder.embed(volumes.store, rows, volumes.runtime)

    name = encoder.folder.name
    return Entry("2d", f"2d: {name}", f"2d {encoder.digest()}", volumes.lookup(compute))


def _encoder_entry(
    volumes: Volumes, encoder: Callable[[], Encoder], name: str, label: str, identity: str
) -> Entry:
    def compute(rows: np.ndarray) -> np.ndarray:
        return kept_features(volumes, encoder()).pooled(rows)

    return Entry(name, label, identity, volumes.lookup(compute), lambda cohort: encoder())


def kept_features(volumes: Volumes, encoder: Encoder) -> KeptFeatures:
    """The kept features of an encoder; a random one's are kept as well, by its weights."""
    return KeptFeatures(
        encoder.module, encoder.cfg, volumes.store, volumes.runtime, features_folder(encoder.cfg)
    )
