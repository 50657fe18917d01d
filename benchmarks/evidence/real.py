"""The data of benchmarks.evidence from real eyes: volumes to train on, others with a label of every voxel.

In: a folder with `manifest.tsv` and `participants.tsv`, as in docs/guides/importers.md; the manifest's
column `labels` names the label volume of an eye that is evaluated, and is empty for one that is trained on.
A label volume holds 0 for no layer and 1..L for the layers: a `.npy` array [D, H, W] that lies as the scan's
file does (NIfTI: before its affine turns an axis), or a file of 8 bits that `prepare` opens (NIfTI).
Out, below the root: what `evidence data` writes, so that `calibrate`, `run`, `curves` and `table` go on from
there, and labels/, the middle B-scan of every labelled eye with the edges of its layers. Of the tasks only
layer occupancy is scored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from benchmarks.evidence.cohorts import FOLDS, make_store, save_truth
from benchmarks.truth_tokens import token_shares
from data_setup.manifest import Record, read_records
from data_setup.readers.faults import OCTReadError
from data_setup.readers.labels import read_label_volume
from data_setup.readers.open_record import labelled_header, open_record
from data_setup.store.reader import PreparedStore
from utils.config.load import load_config
from utils.config.schema import Config
from utils.errors import UserError

LINK = "eyes"  # name of the link to the user's folder, below each tree
SOURCE = "source.json"  # what the stores and the truth below a root were made of
PICTURES = "labels"
LAYER_COLOURS = np.array(
    [[230, 60, 60], [60, 200, 80], [70, 120, 255], [240, 200, 40], [220, 90, 220], [60, 210, 220]], np.uint8
)
MOST_LAYERS = 64  # a label above is none: 255 means "unknown" to some tools


def make_real_data(root: Path, data: Path, cfg: Config, base: Path, extra: Sequence[str]) -> None:
    """Write what is missing below `root`: trees, stores (geometry of `cfg`), truth.npz, a picture of every
    label volume.

    Raises UserError for a table or label volume that cannot be used, and for a root that holds other data.
    """
    table = read_table(data)
    settle_source(root, data, table)
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
    path = data / "participants.tsv"
    known = table[["person_id"]].drop_duplicates()  # the file may be missing, as for any folder
    if path.exists():
        known = pd.read_csv(path, sep="\t", dtype=str, index_col=False)
    if "person_id" not in known:
        raise UserError(f"{path}: expected a column person_id, found {', '.join(known.columns)}")
    people = known[known["person_id"].isin(table["person_id"])].assign(
        recommended_split=split, study_group=""
    )
    people.to_csv(tree / "participants.tsv", sep="\t", index=False)


def write_real_truth(
    root: Path, data: Path, table: pd.DataFrame, cfg: Config, base: Path, extra: Sequence[str]
) -> None:
    """Sampled tokens of every evaluated volume, and the share of each layer in them."""
    store = PreparedStore.open(str(root / "evaluation_store"))
    if (people := store.index.loc[store.kept]["person_id"].nunique()) < FOLDS:
        raise UserError(
            f"{root / 'evaluation_store'}: expected usable eyes of {FOLDS} labelled people or more, found "
            f"{people}; prepare's report above says why the others are rejected"
        )
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
        draw_labels(root / PICTURES, records[path], volumes[int(row)])
    count = max(int(labels.max()) for labels in volumes.values())
    if count == 0:
        raise UserError(f"{data / 'manifest.tsv'}: expected label volumes with layers 1..L, found only 0")
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
    lies_as_file = path.suffix == ".npy"
    if lies_as_file:
        labels = np.load(path, allow_pickle=False)
    else:
        try:
            scan = record.url, record.path
            read = read_label_volume(str(path), path.name, (shape[0], shape[1], shape[2]), scan)
        except OCTReadError as error:
            raise UserError(f"{error}; an array of the labels saved as .npy is read, too") from error
        labels, lies_as_file = read.values, read.is_in_file_order
    kind = f"{labels.dtype} of shape {list(labels.shape)}"
    if labels.shape != shape or labels.dtype.kind not in "ui":
        raise UserError(
            f"{path}: expected whole numbers of shape {list(shape)}, that of {record.path}, found {kind}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > MOST_LAYERS:
        raise UserError(
            f"{path}: expected 0 for no layer and layers up to {MOST_LAYERS}, found {low} to {high}; a voxel "
            "that nobody labelled counts as no layer, so leave that scan out"
        )
    header = labelled_header(record, None) if lies_as_file else None
    return (labels if header is None else header.from_file_order(labels)).astype(np.uint8)


def draw_labels(folder: Path, record: Record, labels: np.ndarray) -> None:
    """The middle B-scan with the upper edge of each layer in colour, as PNG: do labels and scan agree?"""
    folder.mkdir(exist_ok=True)
    _, frames = open_record(record)
    middle = len(labels) // 2
    scan = next(frame for number, frame in enumerate(frames) if number == middle).astype(np.float32)
    grey = (255 * scan / max(1.0, float(scan.max()))).astype(np.uint8)
    picture = np.repeat(grey[..., None], 3, axis=-1)
    edge = np.zeros(scan.shape, bool)
    edge[1:] = labels[middle, 1:] != labels[middle, :-1]
    picture[edge] = LAYER_COLOURS[labels[middle][edge] % len(LAYER_COLOURS)]
    name = re.sub(r"[^\w.-]", "_", f"{record.person_id}_{record.path.removeprefix(f'{LINK}/')}")
    Image.fromarray(picture).save(folder / f"{name}.png")


def settle_source(root: Path, data: Path, table: pd.DataFrame) -> None:
    """Remember what is evaluated; raises UserError where the root was made of something else."""
    listed = [data / name for name in sorted(set(table["labels"].dropna()))]
    missing = next((path for path in listed if not path.exists()), None)
    if missing is not None:
        raise UserError(
            f"{missing}: expected the label volume of {data / 'manifest.tsv'}, found no such file"
        )
    people = data / "participants.tsv"
    files = [data / "manifest.tsv", *([people] if people.exists() else []), *listed]
    now = {"data": str(data.resolve())} | {path.relative_to(data).as_posix(): digest(path) for path in files}
    mark = root / SOURCE
    if not mark.exists():
        if (root / "truth.npz").exists() or (root / "pretraining" / "synthetic.json").exists():
            raise UserError(f"{root}: expected another root for these eyes, found that of `evidence data`")
        mark.write_text(json.dumps(now, indent=1) + "\n")
        return
    before = json.loads(mark.read_text())
    if not (root / "truth.npz").exists() and before["data"] == now["data"]:  # a label was refused, and mended
        mark.write_text(json.dumps(now, indent=1) + "\n")
        return
    changed = next((name for name in sorted({*now, *before}) if now.get(name) != before.get(name)), None)
    if changed is not None:
        raise UserError(
            f"{mark}: {changed}: expected {before.get(changed)} as this root was made of, found "
            f"{now.get(changed)}; use another --root"
        )


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the files of a folder with their names."""
    total = hashlib.sha256()
    for part in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        total.update(part.name.encode() + hashlib.sha256(part.read_bytes()).digest())
    return total.hexdigest()


def refuse_real(root: Path, command: str) -> None:
    """Raise UserError where the root holds real eyes: `command` would put phantom people beside them."""
    if (root / SOURCE).exists():
        raise UserError(f"{root}: expected a root of the phantom for `evidence {command}`, found real eyes")
