"""The data of benchmarks.evidence: two phantom cohorts, their stores, and the truth per token.

In: a folder and two numbers of participants. Out, below the folder:
  pretraining, evaluation    phantom trees of different seeds, so of different people, whatever their ids
  *_store                    their prepared stores
  truth.npz                  layer thickness of every evaluated volume, layer occupancy of sampled tokens

benchmarks.truth_tokens says what layer occupancy is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold

from benchmarks.truth_tokens import layer_occupancy, read_truth_file, sample_tokens, valid_tokens
from data_setup import prepare
from data_setup.phantom import __main__ as phantom
from data_setup.store.reader import PreparedStore
from utils.config.schema import Config, SpatialConfig
from utils.errors import UserError

PRETRAINING_SEED, EVALUATION_SEED = 1001, 1002
FOLDS = 5
LEAST_TOKENS = 16_384  # of all volumes: of a few eyes every token is asked about
DATA = (
    *("pretraining", "pretraining_store", "pretraining_participants.tsv"),
    *("evaluation", "evaluation_store", "truth.npz"),
)


@dataclass(frozen=True)
class Truth:
    """The evaluation cohort: what there is to predict, in the order of `rows`."""

    rows: np.ndarray  # store rows [n]
    person: np.ndarray  # [n]
    protocol: np.ndarray  # [n]
    label: np.ndarray  # class number [n]
    classes: tuple[str, ...]
    thickness_um: np.ndarray  # [n, L]
    layers: tuple[str, ...]
    tokens: np.ndarray  # sampled valid tokens of the reference grid, sorted: [n, T]; -1 where there are fewer
    occupancy: np.ndarray  # share of each layer in these tokens [n, T, L]; 0 where there is none
    fold: np.ndarray  # which fold evaluates the row's participant [n]
    is_split: bool = False  # one fold alone: `fold` is TRAIN, VAL or EVALUATED of finetuning.cohort
    labelled: np.ndarray | None = None  # bool [FOLDS, n]: whose labels each fold may learn; None: all


def make_data(root: Path, cfg: Config, base: Path, extra: Sequence[str], people: tuple[int, int]) -> None:
    """Write what is missing below `root`: trees, stores (geometry of `cfg`), truth.npz."""
    make_phantom(root / "pretraining", people[0], PRETRAINING_SEED)
    everyone = pd.read_csv(root / "pretraining" / "participants.tsv", sep="\t", dtype=str)
    everyone["recommended_split"] = "train"  # other people are evaluated
    everyone.to_csv(root / "pretraining_participants.tsv", sep="\t", index=False)
    make_store(root, "pretraining", root / "pretraining_participants.tsv", base, extra)
    make_phantom(root / "evaluation", people[1], EVALUATION_SEED)
    make_store(root, "evaluation", root / "evaluation" / "participants.tsv", base, extra)
    if not (root / "truth.npz").exists():
        write_truth(root, cfg.spatial)


def link_data(root: Path, folder: Path) -> None:
    """Links in `folder` to the data of `root`; raises UserError where they are not made yet."""
    for name in DATA:
        if not (root / name).exists():
            raise UserError(f"{root / name}: expected the data, found none; run `evidence data`")
    link(DATA, root, folder)


def link(names: Sequence[str], source: Path, folder: Path) -> None:
    """Links in `folder` to what lies in `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(source / name)


def make_phantom(tree: Path, count: int, seed: int) -> None:
    """Write a phantom tree if there is none."""
    if not (tree / "synthetic.json").exists():
        phantom.main(["--out", str(tree), "--participants", str(count), "--seed", str(seed)])


def make_store(folder: Path, name: str, table: Path, base: Path, extra: Sequence[str]) -> None:
    """Prepare `NAME_store` from the tree `NAME` with the participants of a table."""
    places = [f"data.gcs_root={folder / name}", f"data.store={folder / f'{name}_store'}"]
    code = prepare.main(["--config", str(base), *places, f"data.participants_path={table}", *extra])
    if code:
        raise SystemExit(code)


def write_truth(root: Path, spatial: SpatialConfig) -> None:
    """Thickness, sampled tokens and their occupancy of every kept volume of the evaluation store."""
    store = PreparedStore.open(str(root / "evaluation_store"))
    shares, thickness, layers = {}, {}, ()
    for row in store.kept:
        record = store.index.loc[row]
        truth = read_truth_file(str(root / "evaluation"), record)
        layers = tuple(truth["layer_names"].tolist())
        thickness[int(row)] = truth["layer_thickness_um"]
        shares[int(row)] = layer_occupancy(truth, record, spatial)
    save_truth(root, store, spatial, shares, layers, thickness)


def save_truth(
    root: Path,
    store: PreparedStore,
    spatial: SpatialConfig,
    shares: dict[int, np.ndarray],
    layers: tuple[str, ...],
    thickness: dict[int, np.ndarray],
) -> None:
    """Write truth.npz: some valid tokens of each row of `shares` [N, L], and its `thickness` [L] if known."""
    tokens, occupancy = [], []
    for row, shares_NL in shares.items():
        valid = valid_tokens(store.index.loc[row], spatial)
        chosen = sample_tokens(valid, row, LEAST_TOKENS // len(shares))
        tokens.append(chosen)
        occupancy.append(np.where(chosen[:, None] >= 0, shares_NL[chosen], 0.0))
    thickness_um = [thickness[row] for row in shares] if thickness else np.zeros((len(shares), 0))
    part = root / "truth.part.npz"
    np.savez_compressed(
        part,
        rows=np.array(list(shares)),
        thickness_um=np.array(thickness_um, np.float32),
        layers=np.array(layers),
        tokens=np.array(tokens),
        occupancy=np.array(occupancy, np.float32),
    )
    part.replace(root / "truth.npz")


def tokens_of_another_grid(
    tokens: np.ndarray, grid: tuple[int, int, int], other: tuple[int, int, int]
) -> np.ndarray:
    """The token of `other` in which the centre of each token of `grid` lies; both cover one volume."""
    index = np.unravel_index(tokens, grid)
    there = [(2 * i + 1) * m // (2 * n) for i, n, m in zip(index, grid, other, strict=True)]
    return np.ravel_multi_index(there, other)


def read_truth(root: Path) -> Truth:
    """truth.npz with the people, labels and folds of the evaluation store."""
    store = PreparedStore.open(str(root / "evaluation_store"))
    with np.load(root / "truth.npz") as arrays:
        rows, thickness, layers = arrays["rows"], arrays["thickness_um"], arrays["layers"]
        tokens, occupancy = arrays["tokens"], arrays["occupancy"]
    index = store.index.loc[rows]
    person = index["person_id"].to_numpy(str)
    classes, label = np.unique(index["study_group"].fillna("").to_numpy(str), return_inverse=True)
    return Truth(
        rows=rows,
        person=person,
        protocol=index["protocol"].to_numpy(str),
        label=label,
        classes=tuple(classes.tolist()),
        thickness_um=thickness,
        layers=tuple(layers.tolist()),
        tokens=tokens,
        occupancy=occupancy,
        fold=fold_of_rows(person, label),
    )


def fold_of_rows(person: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Fold 0..FOLDS-1 of every row, by participant, stratified by class."""
    people, first = np.unique(person, return_index=True)
    fold = np.full(len(people), -1)
    split = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(people, label[first])
    for number, (_, evaluated) in enumerate(split):
        fold[evaluated] = number
    return fold[np.searchsorted(people, person)]
