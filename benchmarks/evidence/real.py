"""The data of benchmarks.evidence from real eyes: volumes to train on, others with a label of every voxel.

In: a folder with `manifest.tsv` and `participants.tsv`, as in docs/guides/importers.md; the manifest's
column `labels` names the label volume of an eye that is evaluated, and is empty for one that is trained on.
A label volume holds 0 for no layer and 1..L for the layers: a `.npy` array [D, H, W] in the order in which
the volume's own frames are read, or a file of 8 bits that `prepare` opens (NIfTI).
Out, below the root: what `evidence data` writes, so that `calibrate`, `run` and `table` go on from there. Of
the tasks only layer occupancy is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.evidence.cohorts import FOLDS, make_store, save_truth
from data_setup.manifest import Record, read_records
from data_setup.phantom.truth_tokens import token_shares
from data_setup.readers.open_record import open_record
from data_setup.store.reader import PreparedStore
from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import UserError

LINK = "eyes"  # name of the link to the user's folder, below each tree


def make_real_data(root: Path, data: Path, cfg: Config, base: Path, extra: Sequence[str]) -> None:
    """Write what is missing below `root`: trees, stores (geometry of `cfg`), truth.npz.

    Raises UserError for a table or label volume that cannot be used.
    """
    table = read_table(data)
    is_labelled = table["labels"].notna()
    trees = {"pretraining": table[~is_labelled], "evaluation": table[is_labelled]}
    for name, part in trees.items():
        make_tree(root / name, data, part, "train" if name == "pretraining" else "test")
        people = root / name / "participants.tsv"
        if name == "pretraining":
            people = people.rename(root / "pretraining_participants.tsv")
        make_store(root, name, people, base, extra)
    if not (root / "truth.npz").exists():
        write_real_truth(root, data, trees["evaluation"], cfg, base, extra)


def read_table(data: Path) -> pd.DataFrame:
    """manifest.tsv with `labels` NaN where an eye has none; raises UserError for what is wrong with it."""
    path = data / "manifest.tsv"
    if not path.is_file():
        raise UserError(f"{path}: expected a table of volumes with a column labels, found no such file")
    table = pd.read_csv(path, sep="\t", dtype=str, index_col=False)
    missing = [
        name for name in ("person_id", "filepath", "device", "protocol", "labels") if name not in table
    ]
    if missing:
        raise UserError(f"{path}: expected a column {missing[0]}, found {', '.join(table.columns)}")
    is_labelled = table["labels"].notna()
    both = set(table["person_id"][is_labelled]) & set(table["person_id"][~is_labelled])
    if both:
        raise UserError(
            f"{path}: expected other people to evaluate than to train on, found {sorted(both)[0]} in both; "
            "fill or clear the column labels for all volumes of a person"
        )
    people = table["person_id"][is_labelled].nunique()
    if people < FOLDS or is_labelled.all():
        raise UserError(
            f"{path}: expected volumes without labels, and labels of {FOLDS} people or more (the folds), "
            f"found {(~is_labelled).sum()} and {people}"
        )
    return table


def make_tree(tree: Path, data: Path, table: pd.DataFrame, split: str) -> None:
    """An own tree of these volumes, all of one split, that reads the files through a link."""
    (tree / "retinal_oct").mkdir(parents=True, exist_ok=True)
    if not (tree / LINK).exists():
        (tree / LINK).symlink_to(data.resolve(), target_is_directory=True)
    manifest = table.drop(columns="labels").assign(filepath=f"{LINK}/" + table["filepath"])
    manifest.to_csv(tree / "retinal_oct" / "manifest.tsv", sep="\t", index=False)
    known = pd.read_csv(data / "participants.tsv", sep="\t", dtype=str, index_col=False)
    people = known[known["person_id"].isin(table["person_id"])].assign(
        recommended_split=split, study_group=""
    )
    people.to_csv(tree / "participants.tsv", sep="\t", index=False)


def write_real_truth(
    root: Path, data: Path, table: pd.DataFrame, cfg: Config, base: Path, extra: Sequence[str]
) -> None:
    """Sampled tokens of every evaluated volume, and the share of each layer in them."""
    store = PreparedStore.open(str(root / "evaluation_store"))
    tree = root / "evaluation"
    places = [f"data.gcs_root={tree}", f"data.store={root / 'evaluation_store'}"]
    records = {record.path: record for record in read_records(load_config(base, [*places, *extra])).records}
    label_of = dict(zip(f"{LINK}/" + table["filepath"], table["labels"], strict=True))
    volumes = {}
    for row in store.kept:
        record = store.index.loc[row]
        path = str(record["path"])
        shape = tuple(int(record[f"shape_before_{axis}"]) for axis in "dhw")
        volumes[int(row)] = read_labels(data / label_of[path], records[path], shape)
    count = max(int(labels.max()) for labels in volumes.values())
    if count == 0:
        raise UserError(f"{data / 'manifest.tsv'}: expected label volumes with layers 1..L, found 0 alone")
    shares = {
        row: token_shares(
            (
                (np.where(frame == layer, 255, 0).astype(np.uint8) for frame in labels)
                for layer in range(1, count + 1)
            ),
            store.index.loc[row],
            cfg.spatial,
        )
        for row, labels in volumes.items()
    }
    save_truth(root, store, cfg.spatial, shares, tuple(str(layer) for layer in range(1, count + 1)), {})


def read_labels(path: Path, record: Record, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [D, H, W] in the order of the volume's frames; raises UserError for another shape."""
    if not path.exists():
        raise UserError(f"{path}: expected the label volume of {record.path}, found no such file")
    if path.suffix == ".npy":
        labels = np.load(path, allow_pickle=False)
    else:
        _, frames = open_record(replace(record, path=path.name, url=str(path)))
        labels = np.stack(list(frames))
    if labels.shape != shape or labels.dtype.kind not in "ui" or labels.max() > 255:
        raise UserError(
            f"{path}: expected whole numbers up to 255 of shape {list(shape)}, that of {record.path}, found "
            f"{labels.dtype} of shape {list(labels.shape)}"
        )
    return labels.astype(np.uint8)
