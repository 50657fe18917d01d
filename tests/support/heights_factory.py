"""A phantom of small OCTA-type scans with height maps and flow, and its store, by the real stages."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from data_setup import prepare
from data_setup.phantom.__main__ import write_tables
from data_setup.phantom.cohort import Scan, make_participants
from data_setup.phantom.dicom import write_volume
from data_setup.phantom.files import (
    file_path,
    make_spec,
    manifest_row,
    save_npz,
    scan_volume,
    truth_arrays,
    write_file,
)
from data_setup.protocols import PROTOCOLS
from tests.support.octa_faults import write_flow, write_heights
from utils.config.load import load_config
from utils.config.schema import Config

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke_test.yaml"
OCTA = [p for p in PROTOCOLS if "octa" in p.name]
SHAPE = (22, 80, 24)
GRID = ["spatial.target_spacing=[0.75,0.048,0.1875]", "spatial.image_size=[8,48,32]"]
GRID += ["spatial.patch_size=[4,8,8]", "data.workers=0"]


def make_tree(
    root: Path,
    participants: int,
    quirks: Sequence[str] = (),
    protocols: Sequence[int] = range(len(OCTA)),
    shape: tuple[int, int, int] = SHAPE,
) -> Path:
    """A tree with one OCTA-type scan a participant; `protocols`: places in OCTA, in turn."""
    people, rows = make_participants(participants, 0), []
    for folder in ("truth", "retinal_oct"):
        (root / folder).mkdir(parents=True)
    for number, person in enumerate(people):
        protocol = OCTA[protocols[number % len(protocols)]]
        scan = Scan(protocol, "RL"[number % 2], 0, 0)
        volume, spacing = scan_volume(person, scan, 0, "small", shape)
        spec = make_spec(person, scan, spacing, 0, "small", "explicit")
        path = file_path(spec, "v3")
        write_file(root / path, write_volume(volume.voxels, spec))
        save_npz(root / "truth" / f"{spec.sop_instance_uid}.npz", truth_arrays(volume, spec, person))
        rows.append(manifest_row(spec, volume.voxels.shape, f"/{path}"))
    marker = {"synthetic": True, "height_faults": write_heights(root, rows, quirks, 0)}
    write_tables(root, people, rows, "v3")
    (root / "synthetic.json").write_text(json.dumps(marker))
    return root


def words(root: Path, *overrides: str) -> list[str]:
    """Arguments of a command for the tree at root/tree and the store at root/store."""
    places = [f"data.gcs_root={root / 'tree'}", f"data.store={root / 'store'}"]
    return ["--config", str(SMOKE), *GRID, *places, f"run.dir={root / 'run'}", *overrides]


def config(root: Path, *overrides: str) -> Config:
    return load_config(SMOKE, words(root, *overrides)[2:])


def prepare_all(root: Path, *overrides: str, mode: str = "heights") -> None:
    """The store and its height maps, or its flow."""
    for option in ([], [f"--{mode}"]):
        assert prepare.main([*words(root, *overrides), "--workers", "0", *option]) == 0


def dense_overrides(world: Path, run: Path, *extra: str) -> list[str]:
    """Of a short training of decoders on world/pretrained."""
    changes = [f"model.checkpoint={world / 'pretrained'}", f"run.dir={run}", "train.max_steps=24"]
    changes += ["train.global_batch_size=4", "train.per_core_batch_size=4", "wandb.mode=disabled"]
    changes += ["head.hidden=8", "finetune.patience=null"]
    return [*changes, f"train.ckpt_dir={run / 'checkpoints'}", "train.log_every_steps=5", *extra]


def make_flow_tree(
    root: Path,
    participants: int,
    quirks: Sequence[str] = (),
    protocols: Sequence[int] = range(len(OCTA)),
    shape: tuple[int, int, int] = SHAPE,
    height_quirks: Sequence[str] = (),
) -> Path:
    """As make_tree, with flow; what was planted stands in synthetic.json."""
    make_tree(root, participants, height_quirks, protocols, shape)
    rows = rows_of(root / "retinal_oct" / "manifest.tsv")
    marker = json.loads((root / "synthetic.json").read_text())
    marker["flow_faults"] = write_flow(root, rows, quirks, 0)
    (root / "synthetic.json").write_text(json.dumps(marker))
    return root


def rows_of(path: Path) -> list[dict[str, object]]:
    """The lines of a table."""
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file, delimiter="\t")]
