"""`evidence real`: labelled eyes of a user's folder become stores, truth and, at the end, the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from benchmarks.evidence import cli as evidence
from benchmarks.evidence import real
from benchmarks.evidence.arms import CONFIG, CONTROLS, REFERENCE, arm_by_name, arm_config, run_dir
from benchmarks.evidence.cohorts import read_truth
from benchmarks.evidence.real import make_real_data, make_tree, read_labels, read_table, settle_source
from benchmarks.evidence.scores import save_scores, score
from benchmarks.truth_tokens import layer_occupancy
from data_setup import prepare
from data_setup.manifest import read_records, unknown_record
from data_setup.store.reader import PreparedStore
from tests.support.import_factory import write_nifti
from tests.support.process_factory import copies_of_jobs
from utils.config.load import load_config
from utils.errors import UserError

GEOMETRY = ("spatial.target_spacing=[0.75,0.072,0.1875]", "spatial.image_size=[8,32,32]")


def label_volume(truth: dict[str, np.ndarray], rows: int) -> np.ndarray:
    """uint8 [D, H, W]: the layer that holds each voxel's centre, from 1 on; 0 outside all."""
    row_1H1 = np.arange(rows)[None, :, None]
    return (truth["surfaces"][:, :, None, :] <= row_1H1).sum(0).astype(np.uint8) % len(truth["surfaces"])


@pytest.fixture(scope="module")
def eyes(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phantom eyes as a user's folder: 6 people with label volumes, the others without."""
    folder = tmp_path_factory.mktemp("eyes")
    shutil.copytree(pipeline / "phantom", folder, dirs_exist_ok=True)
    cfg = load_config(CONFIG, [f"data.gcs_root={folder}", "data.store=unused"])
    records = read_records(cfg).records
    labelled = sorted({record.person_id for record in records})[:6]
    rows = []
    for number, record in enumerate(records):
        name = ""
        if record.person_id in labelled:
            with np.load(folder / "truth" / f"{record.sop_instance_uid}.npz") as arrays:
                assert record.shape is not None
                labels = label_volume(dict(arrays), record.shape[1])
            name = f"labels/{record.sop_instance_uid}" + (".nii.gz" if number == 0 else ".npy")
            (folder / "labels").mkdir(exist_ok=True)
            if number == 0:
                write_nifti(folder / name, labels, (0.1, 0.004, 0.05))
            else:
                np.save(folder / name, labels)
        rows.append([record.person_id, record.path, record.device, record.protocol, record.laterality, name])
    columns = ["person_id", "filepath", "device", "protocol", "laterality", "labels"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "manifest.tsv", sep="\t", index=False)
    return folder


@pytest.fixture(scope="module")
def made(eyes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of `evidence real` with the data of the eyes."""
    root, prepare_main = tmp_path_factory.mktemp("made"), prepare.main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "main", lambda words: prepare_main([*words, "--workers", "0"]))
        cfg = arm_config(arm_by_name(REFERENCE), 0, 2, root, GEOMETRY)
        make_real_data(root, eyes, cfg, CONFIG, GEOMETRY)
    return root


def test_labels_of_voxels_become_the_occupancy_of_tokens(eyes: Path, made: Path) -> None:
    cfg, truth = arm_config(arm_by_name(REFERENCE), 0, 2, made, GEOMETRY), read_truth(made)
    assert truth.classes == ("",)
    assert truth.thickness_um.shape[1] == 0
    table = read_table(eyes)
    labelled = set(table["person_id"][table["labels"].notna()])
    assert set(truth.person) == labelled
    trained = PreparedStore.open(str(made / "pretraining_store")).index
    assert not set(trained["person_id"]) & labelled
    index = PreparedStore.open(str(made / "evaluation_store")).index
    names = {
        row.path: row.sop_instance_uid
        for row in read_records(load_config(CONFIG, [f"data.gcs_root={eyes}"])).records
    }
    for row, tokens, occupancy in zip(truth.rows, truth.tokens, truth.occupancy, strict=True):
        record = index.loc[row]
        with np.load(eyes / "truth" / f"{names[record['path'].removeprefix('eyes/')]}.npz") as arrays:
            exact = layer_occupancy(dict(arrays), record, cfg.spatial)[tokens.clip(min=0)]
        used = tokens >= 0
        # a voxel has one layer here and shares of two there
        assert np.abs(occupancy[used] - exact[used]).mean() < 0.01
        assert np.corrcoef(occupancy[used].ravel(), exact[used].ravel())[0, 1] > 0.98
    # each label volume has a picture: grey but for the layers' edges in its middle B-scan
    pictures = sorted((made / "labels").glob("*.png"))
    assert len(pictures) == len(truth.rows)
    of_path = table.set_index("filepath")["labels"]
    for path in truth_paths(index, truth.rows):
        if (name := of_path[path]).endswith(".npy"):
            volume = np.load(eyes / name)
            middle = volume[len(volume) // 2]
            (picture,) = (one for one in pictures if path.replace("/", "_") in one.name)
            pixels = np.asarray(Image.open(picture))
            edge = np.zeros(middle.shape, bool)
            edge[1:] = middle[1:] != middle[:-1]
            assert np.array_equal((pixels != pixels[..., :1]).any(-1), edge)


def truth_paths(index: pd.DataFrame, rows: np.ndarray) -> list[str]:
    """Paths in the user's folder of some rows of the store."""
    return [str(path).removeprefix("eyes/") for path in index.loc[rows, "path"]]


def small_folder(eyes: Path, folder: Path) -> Path:
    """The eyes' lists and labels, for what needs no scan."""
    folder.mkdir(exist_ok=True)
    for name in ("manifest.tsv", "participants.tsv"):
        shutil.copy(eyes / name, folder / name)
    shutil.copytree(eyes / "labels", folder / "labels")
    return folder


def test_a_root_is_of_one_set_of_eyes_and_never_of_the_phantom(eyes: Path, tmp_path: Path) -> None:
    data, root = small_folder(eyes, tmp_path / "data"), tmp_path / "root"
    root.mkdir()
    table = read_table(data)
    settle_source(root, data, table)
    settle_source(root, data, table)
    labels = data / str(table["labels"].dropna().iloc[1])
    np.save(labels, np.load(labels) * 0)
    settle_source(root, data, table)  # nothing was made of the one before
    (root / "truth.npz").touch()
    np.save(labels, np.load(labels) + 1)  # corrected: truth.npz of before would stay
    with pytest.raises(
        UserError, match=rf"{labels.name}: expected \w{{64}} as this root .* use another --root"
    ):
        settle_source(root, data, table)
    with pytest.raises(UserError, match=r"source\.json: data: expected .*/data as this root"):
        settle_source(root, small_folder(eyes, tmp_path / "other"), table)
    labels.unlink()
    with pytest.raises(
        UserError, match=rf"{labels.name}: expected the label volume of .*manifest\.tsv, found"
    ):
        settle_source(root, data, table)

    phantom = tmp_path / "phantom"
    (phantom / "pretraining").mkdir(parents=True)
    (phantom / "pretraining" / "synthetic.json").touch()
    with pytest.raises(UserError, match="expected another root for these eyes, found that of"):
        settle_source(phantom, eyes, read_table(eyes))
    with pytest.raises(UserError, match="a root of the phantom for `evidence data`"):
        evidence.main(["data", "--root", str(root)])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full((2, 3, 4), -1, np.int16), "expected 0 for no layer and layers up to 64, found -1 to -1"),
        (
            np.full((2, 3, 4), 255, np.uint8),
            "layers up to 64, found 255 to 255; a voxel that nobody labelled",
        ),
        (np.zeros((2, 3, 5), np.uint8), r"whole numbers of shape \[2, 3, 4\], .*uint8 of shape \[2, 3, 5\]"),
        (np.zeros((2, 3, 4)), r"expected whole numbers .* found float64 of shape"),
    ],
)
def test_what_is_no_label_volume_is_said(tmp_path: Path, labels: np.ndarray, message: str) -> None:
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(UserError, match=message):
        read_labels(tmp_path / "labels.npy", unknown_record("eye.npy"), (2, 3, 4))


def test_a_label_volume_that_no_reader_opens_is_one_line(tmp_path: Path) -> None:
    write_nifti(tmp_path / "labels.nii.gz", np.full((2, 3, 4), 0.5), (0.1, 0.004, 0.05))
    with pytest.raises(UserError, match=r"labels\.nii\.gz.*: expected .*saved as \.npy is read, too"):
        read_labels(tmp_path / "labels.nii.gz", unknown_record("eye.nii.gz"), (2, 3, 4))


def test_people_without_a_table_are_those_of_the_manifest(eyes: Path, tmp_path: Path) -> None:
    data = small_folder(eyes, tmp_path / "data")
    (data / "participants.tsv").unlink()
    table = read_table(data)
    make_tree(tmp_path / "tree", data, table, "test")
    people = pd.read_csv(tmp_path / "tree" / "participants.tsv", sep="\t", dtype=str)
    assert sorted(people["person_id"]) == sorted(set(table["person_id"]))
    assert set(people["recommended_split"]) == {"test"}
    (data / "participants.tsv").write_text("name\tage\n")
    with pytest.raises(UserError, match=r"participants\.tsv: expected a column person_id, found name, age"):
        make_tree(tmp_path / "tree", data, table, "test")


def test_people_whose_eyes_are_rejected_are_no_fold(
    eyes: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, cfg = read_table(eyes), arm_config(arm_by_name(REFERENCE), 0, 2, made, GEOMETRY)
    monkeypatch.setattr(real, "FOLDS", 7)
    with pytest.raises(UserError, match=r"evaluation_store: expected usable eyes of 7 labelled .* found 6"):
        real.write_real_truth(made, eyes, table, cfg, CONFIG, GEOMETRY)


def test_what_is_wrong_with_the_table_is_said(eyes: Path, tmp_path: Path) -> None:
    table = pd.read_csv(eyes / "manifest.tsv", sep="\t", dtype=str)
    with pytest.raises(UserError, match=r"manifest\.tsv: expected a table of volumes .*found no such file"):
        read_table(tmp_path)
    (tmp_path / "manifest.tsv").write_text(table.drop(columns="labels").to_csv(sep="\t", index=False))
    with pytest.raises(UserError, match="expected a column labels, found person_id, filepath"):
        read_table(tmp_path)
    both = table.copy()
    both.loc[both.index[both["labels"].notna()][0], "labels"] = None
    (tmp_path / "manifest.tsv").write_text(both.to_csv(sep="\t", index=False))
    with pytest.raises(UserError, match=r"expected other people to evaluate .*, found \d+ in both"):
        read_table(tmp_path)
    few = table[table["person_id"].isin(sorted(set(table["person_id"]))[2:])]
    (tmp_path / "manifest.tsv").write_text(few.to_csv(sep="\t", index=False))
    with pytest.raises(UserError, match=r"labels of 5 people or more .*, found \d+ and 4"):
        read_table(tmp_path)


@pytest.mark.slow
def test_the_whole_command_on_labelled_eyes(eyes: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is trained; the controls have been scored (test_arms.py trains them)."""
    cfg = arm_config(arm_by_name(REFERENCE), 0, 2, made, GEOMETRY)
    truth, rng = read_truth(made), np.random.default_rng(0)
    for name in CONTROLS[1:]:
        guess = rng.normal(size=(*truth.tokens.shape, 3))
        noise = score(truth, None, lambda _, guess=guess: guess, cfg.grid)
        save_scores(run_dir(made, arm_by_name(name), 0), noise, {"name": name, "seed": 0, "steps": 2})
    changes = [word for change in GEOMETRY for word in ("--change", change)]
    copies_of_jobs(monkeypatch)
    words = ["real", "--data", str(eyes), "--root", str(made), "--steps", "2", "--seeds", "1"]
    assert evidence.main([*words, "--only", REFERENCE, *changes]) == 0
    rows = {row["name"]: row for row in json.loads((made / "table.json").read_text())["rows"]}
    assert {REFERENCE, *CONTROLS} <= set(rows)
    assert (made / "runs" / REFERENCE / "seed_0" / "checkpoints").is_dir()
    assert set(rows[REFERENCE]["tasks"]) == {"occupancy", "occupancy_hidden"}
    assert {"place", "own_voxels", "27_patches", "1024_random_of_27"} < set(rows)
    page = (made / "real.md").read_text()
    assert "`python -m benchmarks.evidence real --data FOLDER --steps 2 --seeds 1 --only " in page
    assert f" --change '{GEOMETRY[0]}'" in page
    assert f"{len(truth.rows)} of {len(truth.rows)} with labels evaluated." in page
    assert "* layer occupancy, R2. Shown: " in (made / "real.md").read_text()
