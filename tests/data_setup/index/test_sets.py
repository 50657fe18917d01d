"""data_setup/index/sets: every public set from an imitation in its layout to a store, and one to a probe."""

import csv
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_setup import prepare
from data_setup.index import cli
from data_setup.index.sets import NO_VOLUMES, PLUGS, owners, preset
from data_setup.index.sets.facts import MARKS, Plug, Tree
from data_setup.readers.faults import OCTReadError
from data_setup.store.reader import PreparedStore
from data_setup.tables.splits import dealt_splits, needs_splits
from tests.support import imitations
from tests.support.pipeline_factory import ROOT, SMOKE
from utils.cli import run_cli
from utils.config.load import load_config
from utils.config.schema import StorageOptions
from utils.errors import UserError

SIZE = ",".join(map(str, imitations.SHAPE))
GRID = [f"spatial.image_size=[{SIZE}]", "spatial.patch_size=[1,11,8]", "spatial.resample=resize"]
PLACES = ("data.gcs_root", "data.manifest_path", "data.participants_path")
FULL = ("content", "licence", "access", "citation", "layout", "spacing", "orientation", "labels", "splits")


@dataclass(frozen=True)
class World:
    """An imitation with its tables and its store."""

    plug: Plug
    root: Path
    tables: Path
    store: PreparedStore

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.tables / name).open() as file:
            return list(csv.DictReader(file, delimiter="\t"))

    @property
    def places(self) -> list[str]:
        paths = (self.root, self.tables / "manifest.tsv", self.tables / "participants.tsv")
        return [f"{key}={path}" for key, path in zip(PLACES, paths, strict=True)]


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    @cache
    def make(name: str) -> World:
        folder = tmp_path_factory.mktemp(name)
        root, tables = folder / "set", folder / "tables"
        imitations.IMITATIONS[name](root)
        before = sorted(root.rglob("*"))
        assert cli.main([str(root), "--set", name, "--out", str(tables)]) == 0
        assert sorted(root.rglob("*")) == before  # the set itself is never written to
        store = f"data.store={folder / 'store'}"
        world = World(PLUGS[name], root, tables, None)  # type: ignore[arg-type]
        words = ["--config", str(SMOKE), "--workers", "0", *world.places, store, *GRID]
        assert prepare.main([*words, "data.max_reject_fraction=0"]) == 0
        if world.plug.label_classes or world.plug.surfaces:
            assert prepare.main([*words, "--labels"]) == 0
        return World(PLUGS[name], root, tables, PreparedStore.open(str(folder / "store")))

    return make


def eyes() -> list[imitations.Eye]:
    return [imitations.eye(kind, n) for kind in imitations.KINDS for n in range(12)]


def eye_of(voxels: np.ndarray) -> imitations.Eye:
    """The eye that these voxels are: exactly, or nearest for lossy images."""
    distances = [np.abs(voxels.astype(int) - one.voxels).mean() for one in eyes()]
    assert min(distances) < 2.0 < sorted(distances)[1]
    return eyes()[int(np.argmin(distances))]


@pytest.mark.parametrize("name", PLUGS)
def test_an_imitation_becomes_a_store_with_its_labels(world_of: Callable[[str], World], name: str) -> None:
    """Voxels, surfaces and lesions of store and label files are those of one eye: no axis is swapped."""
    world = world_of(name)
    size = sum(path.stat().st_size for path in world.root.rglob("*") if path.is_file())
    assert 50_000 < size < 250_000
    manifest = {row["filepath"]: row for row in world.rows("manifest.tsv")}
    assert set(manifest) == set(world.store.index.path)
    num_labelled = {"label_volume": 0, "label_surfaces": 0}
    for row, path in world.store.index.path.items():
        eye, cells = eye_of(world.store.read(row)), manifest[path]
        for column in num_labelled:
            if cells.get(column):
                num_labelled[column] += 1
                with np.load(world.tables / cells[column]) as arrays:
                    check_labels(world.plug, dict(arrays), eye, column)
    if any(num_labelled.values()):  # what `prepare --labels` took over
        report = json.loads((Path(world.store.url) / "labels_report.json").read_text())
        assert {c: report[c]["kept"] for c in num_labelled if num_labelled[c]} == {
            c: n for c, n in num_labelled.items() if n
        }
    assert bool(num_labelled["label_volume"]) == bool(world.plug.label_classes)
    assert bool(num_labelled["label_surfaces"]) == bool(world.plug.surfaces)
    classes_file = world.tables / "label_classes.yaml"
    if world.plug.label_classes:
        tree = Tree(str(world.root), StorageOptions())
        assert yaml.safe_load(classes_file.read_text()) == dict(world.plug.classes_of_voxels(tree))
    else:
        assert not classes_file.exists()


def check_labels(plug: Plug, arrays: dict[str, np.ndarray], eye: imitations.Eye, column: str) -> None:
    if column == "label_surfaces":
        surfaces = arrays["surfaces"]
        assert surfaces.dtype == np.float32
        assert arrays["names"].tolist() == list(plug.surfaces)
        known = ~np.isnan(surfaces)
        assert known.any(axis=(1, 2)).all()
        truth = np.stack(list(eye.surfaces.values()))
        order = []
        for surface, is_known in zip(surfaces, known, strict=True):
            differences = [np.abs(surface - one)[is_known].max() for one in truth]
            assert min(differences) <= 0.51  # a set may keep whole rows
            order.append(int(np.argmin([np.abs(surface - one)[is_known].mean() for one in truth])))
        assert order == sorted(set(order))  # from the vitreous down, none twice
    else:
        labels = arrays["labels"]
        assert (labels.dtype, labels.shape) == (np.dtype("u1"), imitations.SHAPE)
        assert set(np.unique(labels)) <= {0, *plug.label_classes}
        for value in set(np.unique(labels)) - {0}:
            if plug.label_classes[int(value)] == "unlabelled":
                continue
            regions = {**eye.lesions, **imitations.layers(eye)}
            assert any(
                np.array_equal((labels == value) & region, labels == value) for region in regions.values()
            )


def test_bscans_that_nobody_graded_are_unlabelled(world_of: Callable[[str], World]) -> None:
    """Duke DME: the imitation has no grades on the second and the last B-scan."""
    world = world_of("duke_dme")
    for row in world.rows("manifest.tsv"):
        with np.load(world.tables / row["label_volume"]) as arrays:
            graded = [set(np.unique(plane)) <= {0, 1} for plane in arrays["labels"]]
            assert graded == [True, False, True, True, False]
            assert (arrays["labels"][[1, 4]] == 255).all()
            assert np.isnan(arrays["surfaces"]).all(axis=(0, 2)).tolist() == [not known for known in graded]


def test_a_bscan_without_a_line_is_ungraded_whatever_its_fluid_is(tmp_path: Path) -> None:
    """Duke DME: 0 in place of NaN is no statement that there is no fluid."""
    one = imitations.eye("fluid", 0)
    fluid, layers = np.zeros(imitations.SHAPE), np.full((8, *imitations.SHAPE[::2]), 5.0)
    fluid[0, 3, 3], layers[:, 2:] = 1, np.nan
    arrays = {"manualFluid1": fluid.transpose(1, 2, 0), "manualLayers1": layers.transpose(0, 2, 1)}
    imitations.write_mat(tmp_path / "Subject_01.mat", images=one.voxels.transpose(1, 2, 0), **arrays)
    (scan,) = PLUGS["duke_dme"].find(Tree(str(tmp_path), StorageOptions()))
    assert scan.labels is not None
    classes = scan.labels(imitations.SHAPE).classes
    assert classes is not None
    assert [set(np.unique(plane)) for plane in classes] == [{0, 1}, {0}, {255}, {255}, {255}]


@pytest.mark.parametrize("names", ['"irf": 1, "irf": 2', '"irf": 1, "srf": 1'])
def test_classes_of_octave_stand_once(tmp_path: Path, names: str) -> None:
    (tmp_path / "dataset.json").write_text(f'{{"labels": {{{names}}}}}')
    with pytest.raises(UserError, match=r"dataset\.json: expected labels"):
        owners.octave_names(Tree(str(tmp_path), StorageOptions()))


def test_the_labels_of_octave_are_there_from_its_inner_folder_too(world_of: Callable[[str], World]) -> None:
    inner = world_of("octave").root / "nnUNet_raw" / "Dataset001_OCTAVE"
    assert all(scan.labels for scan in PLUGS["octave"].find(Tree(str(inner), StorageOptions())))


def test_two_eyes_of_a_person_may_have_two_stages(world_of: Callable[[str], World]) -> None:
    """OIMHS: of the person nothing is said that is true of one eye alone; each volume has its own."""
    world = world_of("oimhs")
    stages = {row["path"]: row["stage"] for row in world.rows("labels.tsv")}
    assert [stages[f"Images/{eye}"] for eye in (1, 2, 3)] == ["stage_1", "stage_2", "stage_3"]
    groups = {row["person_id"]: row["study_group"] for row in world.rows("participants.tsv")}
    assert (groups["101"], groups["102"]) == ("", "stage_3")
    people = {row["filepath"]: row["person_id"] for row in world.rows("manifest.tsv")}
    assert people["Images/1"] == people["Images/2"] == "101"


def test_only_labels_and_age_of_a_person_are_taken_over(world_of: Callable[[str], World]) -> None:
    """FairVision's files have sex, race, ethnicity and language too."""
    world = world_of("fairvision")
    with np.load(next(world.root.rglob("*.npz"))) as file:
        assert {"male", "race", "hispanic", "language"} < set(file.files)
    labels = {"glaucoma", "amd_condition", "dr_subtype"}
    assert set(world.rows("participants.tsv")[0]) == {"person_id", "recommended_split", "age", *labels}


def test_words_of_fairvision_become_the_classes_of_its_owners(
    world_of: Callable[[str], World], tmp_path: Path
) -> None:
    """No diagnosis and a mild one are one class of DR; a word that nobody knows is named, and no class."""
    people = {row["person_id"]: row for row in world_of("fairvision").rows("participants.tsv")}
    assert [people[f"amd_0000{n}"]["amd_condition"] for n in (1, 2)] == ["normal", "early"]
    subtypes = [people[f"dr_0000{n}"]["dr_subtype"] for n in (1, 2)]
    assert subtypes == ["not_vision_threatening", "vision_threatening"]
    assert [people[f"glaucoma_0000{n}"]["glaucoma"] for n in (1, 2)] == ["0", "1"]
    voxels = imitations.eye("normal", 0).voxels
    for number, word in (("1", "moderate.npdr"), ("2", "proliferative")):
        path = tmp_path / "DR" / "Test" / f"data_0000{number}.npz"
        imitations.write_npz(path, oct_bscans=voxels, dr_subtype=word, age=60)
    known, unknown = PLUGS["fairvision"].find(Tree(str(tmp_path), StorageOptions()))
    assert known.labels is not None
    assert known.labels(imitations.SHAPE).facts["dr_subtype"] == "not_vision_threatening"
    assert unknown.labels is not None
    with pytest.raises(OCTReadError, match=r"not_labels: expected dr_subtype of .*, found 'proliferative'"):
        unknown.labels(imitations.SHAPE)


def test_the_printed_commands_reach_the_same_storage(
    world_of: Callable[[str], World], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(world_of("octave").root), "--set", "octave", "--out", str(tmp_path)]
    capsys.readouterr()
    assert cli.main([*command, "--endpoint-url", "http://127.0.0.1:1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "python -m" in line]
    assert len(lines) == 4
    for line in lines:
        assert "data.storage_options.endpoint_url=http://127.0.0.1:1" in shlex.split(line)


def test_a_small_set_without_splits_gets_some(world_of: Callable[[str], World]) -> None:
    """By class, with two people or more on each side, and a person's eyes on one."""
    rows = world_of("neh_ut").rows("participants.tsv")
    sides = {row["person_id"]: (row["recommended_split"], row["study_group"]) for row in rows}
    counts = Counter(split for split, _ in sides.values())
    assert counts == {"train": 8, "val": 2, "test": 2}
    assert {group for split, group in sides.values() if split == "train"} == {"normal", "drusen", "cnv"}
    assert not needs_splits(dict.fromkeys(map(str, range(50)), ""))
    assert not needs_splits({**dict.fromkeys(map(str, range(9)), ""), "9": "train"})


def test_each_side_of_a_small_set_has_its_share_of_each_class() -> None:
    """A fifth of 40, with a quarter of it of the rare class; two people where a fifth is one."""
    group = {f"a{number}": "rare" if number % 4 == 0 else "usual" for number in range(40)}
    sides = dealt_splits(group)
    counts = Counter((sides[person], group[person]) for person in group)
    pairs = [(counts[side, "usual"], counts[side, "rare"]) for side in ("train", "val", "test")]
    assert pairs == [(18, 6), (6, 2), (6, 2)]
    few = {f"p{number}": "usual" for number in range(6)}
    assert Counter(dealt_splits(few).values()) == {"train": 2, "val": 2, "test": 2}
    needing = [needs_splits(dict.fromkeys(map(str, range(count)), "")) for count in (5, 6, 49)]
    assert needing == [False, True, True]


def test_a_biomarker_that_is_no_number_is_named(tmp_path: Path) -> None:
    imitations.IMITATIONS["olives"](tmp_path)
    table = next(tmp_path.rglob("Biomarker_Clinical_Data_Images.csv"))
    lines = table.read_text().splitlines()
    cells = lines[1].split(",")
    cells[2] = "n.a."
    table.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]))
    with pytest.raises(UserError, match=r"Fluid \(IRF\): expected 0 or 1, found 'n\.a\.'"):
        cli.main([str(tmp_path), "--set", "olives"])


def test_a_short_row_of_a_sheet_has_empty_cells_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ID,age,eye\n1,50\n2,60,L\n")
    tree = Tree(str(tmp_path), StorageOptions())
    assert [row["eye"] for row in owners.sheet(tree, "a.csv", ("ID",))] == ["", "L"]
    (tmp_path / "a.csv").write_text("ID,age,eye\n1,50,L,x\n")
    with pytest.raises(UserError, match="line 2: expected 3 fields, as in the header, found 4"):
        owners.sheet(tree, "a.csv", ("ID",))


def test_classes_beyond_a_byte_are_refused(tmp_path: Path) -> None:
    """RETOUCH: 257 is not class 1."""
    one = imitations.eye("fluid", 0)
    imitations.write_mhd(tmp_path / "TRAIN001" / "oct.mhd", one.voxels)
    values = np.full(imitations.SHAPE, 257, np.uint16)
    imitations.write_mhd(tmp_path / "TRAIN001" / "reference.mhd", values)
    (scan,) = PLUGS["retouch"].find(Tree(str(tmp_path), StorageOptions()))
    assert scan.labels is not None
    with pytest.raises(OCTReadError, match="not_labels: expected whole numbers from 0 to 255"):
        scan.labels(imitations.SHAPE)


def test_a_mask_has_known_colours_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OIMHS: red is the hole; a colour that has no name is named, and no class is guessed."""
    pair = np.zeros((5, 8, 16, 3), np.uint8)
    pair[:, :, :8] = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 1))
    pair[:, 2:4, 9:11] = (255, 0, 0)
    imitations.write_spacing(tmp_path)
    for eye in ("1", "2"):
        for number, pixels in enumerate(pair, start=1):
            imitations.write_image(tmp_path / "Images" / eye / f"{number}.png", pixels)
        pair[3, 6, 12] = (1, 2, 3)
    assert cli.main([str(tmp_path), "--set", "oimhs"]) == 0
    assert "labels not used: 1 (Images/2): unsupported_pixels: expected colours macular_hole (255, 0, 0)" in (
        text := capsys.readouterr().out
    )
    assert "found (1, 2, 3)" in text
    hole = np.zeros((5, 8, 8), np.uint8)
    hole[:, 2:4, 1:3] = 1
    with np.load(tmp_path / "labels" / "Images__1.npz") as arrays:
        np.testing.assert_array_equal(arrays["labels"], hole)
    names = yaml.safe_load((tmp_path / "label_classes.yaml").read_text())
    assert names[1] == "macular_hole"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an untrained model of two blocks on the grid that all imitations share."""
    from models import vit3d
    from tests.support.finetune_factory import save_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit3d.SIZES, "ti", vit3d.Size(2, 48, 2))
        yield save_checkpoint(load_config(SMOKE, [*GRID, f"run.dir={folder}"]))


TINY = ["train.max_steps=1", "head.hidden=4", "train.global_batch_size=4", "train.per_core_batch_size=4"]
TINY += ["finetune.against_random=false", "finetune.patience=null", "wandb.mode=disabled", "data.workers=0"]
HEAD = ["train.epochs=1", "head.learning_rates=[1.0e-3]", "head.weight_decays=[0.01]"]
DENSE = ("layers", "segmentation")


@pytest.mark.parametrize("name", PLUGS)
def test_every_task_of_a_plug_trains(
    world_of: Callable[[str], World], checkpoint: str, tmp_path: Path, name: str
) -> None:
    """A head on a frozen encoder, one step of a decoder; labels of voxels and surfaces each have a task."""
    from finetuning import train
    from utils.checkpoint import load_checkpoint

    world = world_of(name)
    kinds = []
    for number, task in enumerate(world.plug.tasks):
        run = tmp_path / str(number)
        words = [text.replace("{out}", str(world.tables)) for text in task.overrides]
        words += [*world.places, f"data.store={world.store.url}", f"model.checkpoint={checkpoint}"]
        words += [f"run.dir={run}", f"train.ckpt_dir={run}", "wandb.mode=disabled", "data.workers=0"]
        is_dense = any(kind in task.config for kind in DENSE)
        assert train.train(str(ROOT / task.config), [*words, *(TINY if is_dense else HEAD)]) == 0
        state = load_checkpoint(str(run / "head.pt"), StorageOptions())
        kinds.append(state["kind"])
    assert ("segmentation" in kinds) == bool(world.plug.label_classes)
    assert ("layers" in kinds) == bool(world.plug.surfaces)


@pytest.mark.parametrize("name", PLUGS)
def test_a_plug_says_how_certain_it_is(name: str) -> None:
    plug = PLUGS[name]
    assert tuple(plug.facts) == FULL
    assert all(fact.mark in MARKS and fact.text for fact in plug.facts.values())


def test_the_summary_counts_what_is_there(
    world_of: Callable[[str], World], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = world_of("retouch")
    capsys.readouterr()
    assert cli.main([str(world.root), "--set", "retouch", "--out", str(tmp_path / "retouch")]) == 0
    text = capsys.readouterr().out
    assert "9 volumes of 9 people" in text
    assert "zeiss_cirrus 3" in text
    assert "retouch_cirrus 3" in text
    assert "labels      9 volumes with voxels, 0 with surfaces" in text
    assert "not verified, look before you rely on it: " not in text
    assert "\nclasses" not in text
    assert f"{' x '.join(map(str, imitations.SHAPE))} 9" in text
    assert cli.main([str(world_of("octave").root), "--set", "octave", "--out", str(tmp_path / "octave")]) == 0
    text = capsys.readouterr().out
    assert "classes     dme 5, normal 5" in text  # by the names of its files
    assert "not verified, look before you rely on it: orientation" not in text


def test_a_wrong_folder_is_answered_with_the_expected_tree(
    world_of: Callable[[str], World], capsys: pytest.CaptureFixture[str]
) -> None:
    root = world_of("retouch").root
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_cli(lambda: cli.main([str(root), "--set", "octa500", "--out", str(root.parent / "none")]))
    assert end.value.code == 2
    answer = capsys.readouterr()
    assert PLUGS["octa500"].facts["layout"].text in answer.out
    *_, line = answer.err.splitlines()  # after what is begun
    assert "found no volume of it in 36 files (RETOUCH-" in line


def test_sets_of_single_images_have_a_reason() -> None:
    with pytest.raises(UserError, match="kermany: expected a set of volumes, found one of single B-scans"):
        cli.main(["anywhere", "--set", "kermany"])
    with pytest.raises(UserError, match=r"found 'octa50' \(near octa500\)"):
        cli.main(["--sets", "octa50"])
    assert not set(NO_VOLUMES) & set(PLUGS)
    text = "\n".join(preset.overview())
    assert all(f"{name} " in text for name in (*PLUGS, *NO_VOLUMES))


def test_a_second_run_keeps_what_somebody_wrote(world_of: Callable[[str], World], tmp_path: Path) -> None:
    world = world_of("retouch")
    command = [str(world.root), "--set", "retouch", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    first = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert cli.main(command) == 0  # the same again
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == first
    path = tmp_path / "manifest.tsv"
    edited = path.read_text().replace("\tunknown\t", "\tsuperior_to_inferior\t", 1)
    path.write_text(edited)
    assert cli.main(command) == 0
    assert path.read_text() == edited
    (tmp_path / "label_classes.yaml").write_text("1: fluid\n")
    with pytest.raises(UserError, match="found another: give --out DIR"):
        cli.main(command)


def test_the_page_names_every_set() -> None:
    page = " ".join((ROOT / "docs" / "guides" / "importers.md").read_text().split())
    assert {plug.name for plug in PLUGS.values() if f"`{plug.name}` ({plug.title})" not in page} == set()


@pytest.mark.slow
def test_from_an_imitation_to_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that index prints, but for the geometry."""
    from finetuning import train
    from tests.support.finetune_factory import save_checkpoint

    root, tables, store = (tmp_path / name for name in ("set", "tables", "tables_store"))
    imitations.IMITATIONS["octa500"](root)
    cli.main([str(root), "--set", "octa500", "--out", str(tables)])
    printed = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if "python -m" in line]
    commands = [shlex.split(line) for line in printed[-4:]]
    grid = ["spatial.image_size=[5,44,32]", "spatial.patch_size=[1,11,8]"]
    grid += ["spatial.target_spacing=[0.6,0.049,0.19]"]
    first, labels, probe, _ = commands
    assert [first[2], labels[2], probe[2]] == ["data_setup.prepare"] * 2 + ["finetuning.train"]
    assert prepare.main([*first[3:], *grid, "--workers", "0"]) == 0
    cfg = load_config(SMOKE, [*grid, f"data.store={store}", f"run.dir={tmp_path / 'pretrained'}"])
    checkpoint = save_checkpoint(cfg)
    words = [word.replace("=RUN", f"={checkpoint}") for word in probe[3:]]
    words += ["train.epochs=3", f"run.dir={tmp_path / 'probe'}", "wandb.mode=disabled", "data.workers=0"]
    assert train.main(words) == 0
    assert (tmp_path / "probe" / "checkpoints" / "head.pt").exists()
