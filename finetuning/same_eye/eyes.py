"""Who is compared: one volume for each eye and device, and the volumes that probes are fitted on.

In: a configuration and the store. Out: `Eyes`. The evaluated people are those of eval.split. Of the volumes
of an eye on one device that pass the data.* filters one counts: that of the protocol which most evaluated
eyes have on this device (of equals one of the macula, then the first by name), so a device stands for one
protocol. Probes are fitted on volumes of the same protocols of split train, and choose on split val.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd

from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL
from finetuning.cohort.labels import units_of
from utils.config.schema import Config
from utils.errors import ConfigError, UserError

MIN_EYES = 2
TRAIN_VOLUMES, VAL_VOLUMES = 256, 96  # of so many the probes are fitted and chosen
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eyes:
    """Volumes of three folds; of EVALUATED at most one for each eye and device, each eye on two or more."""

    rows: np.ndarray  # store rows [n]
    fold: np.ndarray  # TRAIN, VAL or EVALUATED [n]
    person: np.ndarray  # str [n]
    eye: np.ndarray  # str [n]: PERSON_L or PERSON_R
    device: np.ndarray  # str [n]
    protocol_of: dict[str, str]  # device -> protocol

    @property
    def evaluated(self) -> np.ndarray:
        """bool [n]."""
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
        raise ConfigError("eval.protocol: expected official with --same-eye, found crossfit")
    index = store.index.loc[store.kept]
    index = select_wanted(cfg, index[index["listed"]])
    index = index.assign(eye=units_of(index, "eye"))
    index = index[index["eye"].notna() & (index["device"].fillna("") != "")]
    asked = index[index["split"] == cfg.eval.split]
    protocol_of = _protocols(asked)
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
        "%d volumes of %d eyes; %d others of the same eye and device, or of one device alone, are left out",
        len(paired), paired["eye"].nunique(), len(asked) - len(paired),
    )  # fmt: skip
    parts = [_some(index, "train", TRAIN_VOLUMES, cfg.seed), _some(index, "val", VAL_VOLUMES, cfg.seed)]
    if not all(len(part) for part in parts):
        raise UserError(f"{store.url}: expected volumes of split train and val, found none of one of them")
    parts.append(paired)
    whole = pd.concat(parts)
    return Eyes(
        whole.index.to_numpy(),
        np.repeat([TRAIN, VAL, EVALUATED], [len(part) for part in parts]),
        whole["person_id"].to_numpy(str),
        whole["eye"].to_numpy(str),
        whole["device"].to_numpy(str),
        protocol_of,
    )


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


def _some(index: pd.DataFrame, split: str, limit: int, seed: int) -> pd.DataFrame:
    """At most `limit` volumes of a split, drawn by the seed, in store order."""
    part = index[index["split"] == split]
    drawn = np.random.default_rng(seed).permutation(len(part))[:limit]
    return part.iloc[np.sort(drawn)]
