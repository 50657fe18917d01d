"""Who is compared: one volume for each eye and device, and training volumes to standardise by.

In: a configuration and the store. Out: `Eyes`. The evaluated people are those of eval.split. Of the volumes
of an eye on one device that pass the data.* filters one counts: that of the protocol which most evaluated
eyes have on this device (of equals one of the macula, then the first by name), so a device stands for one
protocol. The training volumes are of the same protocols, of split train.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd

from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import EVALUATED, TRAIN
from finetuning.cohort.labels import units_of
from utils.config.schema import Config
from utils.errors import ConfigError, UserError

MIN_EYES = 2
TRAIN_VOLUMES = 256  # at most, drawn by the seed
log = logging.getLogger(__name__)


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
