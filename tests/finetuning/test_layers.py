"""Surfaces are learnt from tokens, kept, measured in micrometres, and refuse what does not fit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
import torch

from data_setup.attach.grid import lay_on_grid
from data_setup.attach.stored import OF_LABELS, StoredHeights
from data_setup.loader import evaluation_batches
from data_setup.manifest import read_records, unknown_record
from data_setup.normalisation import plain_view
from data_setup.readers.heights import DEPTH_OF_LABEL, read_stated_heights
from data_setup.readers.labels import read_label_surfaces, read_label_volume
from data_setup.readers.open_record import open_record
from data_setup.store.reader import PreparedStore
from finetuning import evaluate as command
from finetuning import predict as predict_command
from finetuning import train as train_command
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, read_cohort
from finetuning.cohort.source import open_source
from finetuning.dense import decoder as decoders
from finetuning.dense import kinds, training
from finetuning.dense.evaluation import ALL, NOT_ASKED, OnScan, answer, evaluate, markdown
from finetuning.dense.head import ALONE, MEAN, PRETRAINED, RANDOM, encoder_of
from finetuning.dense.kind import Examined, Kind
from finetuning.dense.layers import LAYERS, LayerVolumes, read_volumes, validation_error
from finetuning.dense.planes import Moves, Planes
from finetuning.dense.surfaces import SECTORS, boundary_error_um
from finetuning.features.kept import KeptFeatures, random_encoder
from finetuning.prediction.files import between
from tests.finetuning.test_scans import interleaved
from tests.support.finetune_factory import RUNTIME, save_checkpoint
from tests.support.heights_factory import config, dense_overrides, make_tree, prepare_all
from tests.support.line_fields import documented
from tests.support.process_factory import metrics
from utils.checkpoint import CheckpointError, load_checkpoint
from utils.config.schema import StorageOptions
from utils.errors import EXIT_STOPPED, ConfigError, UserError
from utils.report.tables import layers_tables
from utils.report.volumes import load_layers

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "layers.yaml"
MAESTRO, TRITON, CIRRUS = 1, 2, 4
PATCH = (2, 4, 8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans of three devices with height maps, and a checkpoint of an untrained model."""
    root = tmp_path_factory.mktemp("layers")
    make_tree(root / "tree", 12, (), (MAESTRO, TRITON, CIRRUS), (22, 72, 20))
    prepare_all(root)
    save_checkpoint(config(root, f"run.dir={root / 'pretrained'}"))
    return root


def overrides(world: Path, run: Path, *extra: str) -> list[str]:
    return dense_overrides(world, run, "optim.base_lr=0.01", *extra)


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    run = world / "runs" / "layers"
    assert train_command.main(["--config", str(CONFIG), *overrides(world, run)]) == 0
    return run


@pytest.fixture(scope="module")
def evaluated(trained: Path) -> tuple[Path, str]:
    """The folder of an evaluation, and what it printed."""
    folder = trained.parent / "evaluated"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command.main(["--head", str(trained), f"run.dir={folder}"])
    return folder, printed.getvalue().removesuffix("\n").split("\n", 1)[1]  # after the line that announces


def volumes_of(world: Path, *extra: str) -> LayerVolumes:
    cfg = config(world, "task.kind=layers", *extra)
    return read_volumes(cfg, PreparedStore.open(cfg.data.store))


def test_a_decoder_learns_where_surfaces_lie(trained: Path, evaluated: tuple[Path, str]) -> None:
    """Of people that training did not see, better than mean heights; the best epoch is what is kept."""
    folder, text = evaluated
    content = json.loads((folder / "layers.json").read_text())
    overall = {name: part["value"] for name, part in content["overall"].items()}
    assert set(overall) == {PRETRAINED, RANDOM, ALONE, "mean_heights"}
    assert set(content["against"]) == {*overall} - {PRETRAINED}
    for arm, gained in content["against"].items():
        assert gained["value"] == pytest.approx(overall[arm] - overall[PRETRAINED])
        assert {"doubt", "p", "could_have_shown", "better"} < set(gained)
    ours = [text for text in content["verdicts"] if not text.startswith("No difference")]
    assert all(text.startswith(("The head ", "Pre-training ")) for text in ours)
    assert sum(text.startswith("Pre-training ") for text in content["verdicts"]) <= 1
    assert overall[PRETRAINED] < 0.7 * overall["mean_heights"], overall
    assert content["names"] == sorted(content["names"], key=DEPTH_OF_LABEL.__getitem__)
    layers = {f"{a} to {b}" for a in content["names"] for b in content["names"]}
    for arm in content["by_name"].values():
        assert {"ILM", ALL} < set(arm) <= {*content["names"], *layers, ALL}
        assert arm["ILM"]["dice"]["value"] is None is not arm["ILM"]["hd95_um"]["value"]
    assert "labels of a machine, not truth" in text
    assert (folder / "layers.md").read_text() == text + "\n"
    head = LAYERS.open_head(str(trained), StorageOptions())
    first, second = (arm.encoder.state_dict()["patch_embed.proj.weight"] for arm in head.arms[:2])
    assert not torch.equal(first, second)
    assert head.cfg.model.feature_blocks == [1, 2]  # of an encoder of two blocks
    assert [arm.encoder.feature_width for arm in head.arms] == [96, 96, 0]
    history = head.state["validation"][PRETRAINED]["history"]
    assert min(line["error_um"] for line in history) == head.state["validation"][PRETRAINED]["error_um"]


def test_the_last_update_of_every_arm_has_the_least_rate(trained: Path) -> None:
    optim = LAYERS.open_head(str(trained), StorageOptions()).cfg.optim
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for prefix in ("", f"{RANDOM}/", f"{ALONE}/"):
        validations = [row for row in rows if f"{prefix}val/loss" in row]
        assert len(validations) == 6  # of 24 updates, an epoch of four each
        assert all({f"{prefix}val/{name}" for name in ("error_um", "dice")} < set(row) for row in validations)
        rates = [row[f"{prefix}train/lr"] for row in rows if f"{prefix}train/lr" in row]
        assert rates[-1] == pytest.approx(optim.min_lr_ratio * optim.base_lr)


def test_a_volume_of_each_device_is_kept_for_the_report(trained: Path, evaluated: tuple[Path, str]) -> None:
    """Its surfaces are those that were measured, on the grid: about the same error, from the same heights."""
    folder, _ = evaluated
    lines = pd.read_parquet(folder / "surfaces.parquet")
    lines = lines[(lines.arm == PRETRAINED) & (lines.what == "surface")]
    paths = sorted((folder / "layers").glob("*.npz"))
    assert len(paths) == lines.device.nunique()
    for path in paths:
        picture, own = load_layers(path), lines[lines.row == int(path.stem.removeprefix("row_"))]
        error = boundary_error_um(picture.predicted, picture.truth, picture.spacing[1])
        expected = own.set_index("name").error_um.reindex(picture.names).to_numpy()
        np.testing.assert_allclose(error, expected, rtol=0.1, atol=2)  # um; a row of the grid has 48
        assert picture.title.startswith(own.device.iloc[0])


def test_the_command_writes_height_maps(world: Path, trained: Path, tmp_path: Path) -> None:
    """Of every scan of the store, each with the surfaces of the head."""
    words = ["--files", str(world / "tree" / "retinal_oct"), "--format", "heightmap", "--out", str(tmp_path)]
    assert predict_command.main(["--checkpoint", str(trained), *words]) == 0
    lines = [json.loads(text) for text in (tmp_path / "segments.jsonl").read_text().splitlines()]
    kept = PreparedStore.open(config(world).data.store).index.query("status == 'kept'")
    assert [line["path"] for line in lines] == [str(world / "tree" / path) for path in kept.path]
    assert all(Path(line["file"]).is_file() for line in lines)
    assert set(lines[0]) - {"anonymous"} == documented("files", "layers")
    path, shape = lines[0]["path"], tuple(int(kept.iloc[0][f"shape_before_{a}"]) for a in "dhw")
    surfaces = read_stated_heights(lines[0]["file"]).values
    for form in ("npz", "nifti"):  # the same surfaces, and the layers between them
        out = tmp_path / form
        words = ["--checkpoint", str(trained), "--files", path, "--format", form, "--out", str(out)]
        assert predict_command.main(words) == 0
        line = json.loads((out / "segments.jsonl").read_text())
        assert line["thickness_um"] == pytest.approx(lines[0]["thickness_um"], rel=1e-5)
        assert f",{line['path']},retina,scan," in (out / "study.csv").read_text()
        if form == "npz":
            values, names = read_label_surfaces(line["file"], shape)
            np.testing.assert_allclose(values, surfaces, atol=1e-4)
            assert list(names) == line["surfaces"]
        else:
            drawn = read_label_volume(line["file"], "eye", shape, (line["path"], line["path"])).values
            np.testing.assert_array_equal(drawn, between(surfaces, shape[1]))


def test_the_best_epoch_is_kept(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three epochs the second is best."""
    errors = iter([3.0, 1.0, 2.0])
    score = lambda _, predicted: {"error_um": next(errors) + 0 * len(list(predicted))}  # noqa: E731
    monkeypatch.setitem(kinds.KINDS, "layers", replace(LAYERS, score=score))
    words = ["train.max_steps=12", "finetune.against_random=false", "head.kind=linear", "head.voxels=false"]
    assert train_command.train(str(CONFIG), overrides(world, tmp_path, *words)) == 0
    kept = LAYERS.open_head(str(tmp_path), StorageOptions()).state
    assert (kept["validation"][PRETRAINED]["epoch"], kept["step"]) == (2, 8)


ONE_ARM = ("finetune.against_random=false", "optim.base_lr=1e-3")


@pytest.mark.parametrize(
    ("words", "stops"),
    [
        (("train.ckpt_every_steps=2",), (3, 8)),  # the second in the second arm
        ((*ONE_ARM, "finetune.encoder=trained", "train.per_core_batch_size=2"), (3,)),
        ((*ONE_ARM, "head.kind=linear", "head.voxels=false", "train.val_every_steps=2"), (2,)),
    ],
)
def test_a_run_that_was_stopped_equals_one_that_was_not(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    stops: tuple[int, ...],
) -> None:
    """SIGTERM, then the same command: the same weights and moments, bit for bit, and the same metrics."""
    settings = [*words, "train.max_steps=5", "train.keep_last=99"]
    assert train_command.train(str(CONFIG), overrides(world, tmp_path / "whole", *settings)) == 0
    real, updates = training.train_step, 0

    def step(*arguments: Any) -> float:
        nonlocal updates
        updates += 1
        if updates in stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(training, "train_step", step)
    run = overrides(world, tmp_path / "stopped", *settings)
    for number in stops:
        assert train_command.train(str(CONFIG), run) == EXIT_STOPPED
        assert (tmp_path / "stopped" / "checkpoints" / f"step_{number:08d}.pt").exists()
    assert train_command.train(str(CONFIG), run) == 0
    whole, stopped = (load_states(tmp_path / name) for name in ("whole", "stopped"))
    torch.testing.assert_close(stopped, whole, rtol=0, atol=0)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    made = updates
    assert train_command.train(str(CONFIG), run) == 0  # nothing is left to do
    assert updates == made
    with pytest.raises(UserError, match=r"a run of .* updates, which its rates rest on"):
        train_command.train(str(CONFIG), [*run, "train.max_steps=7"])


def load_states(run: Path) -> list[Any]:
    """All that the last checkpoint has of each arm, but the seconds that it took; and the head's decoders."""
    last = max((run / "checkpoints").glob("step_*.pt"))
    arms = load_checkpoint(str(last))["arms"]
    for arm in arms.values():
        for line in arm["trained"]["history"]:
            line |= {"seconds": 0.0, "processor_seconds": 0.0}
    return [arms, load_checkpoint(str(run / "checkpoints" / "head.pt"))["arms"]]


def test_what_is_asked_again_is_no_look(
    world: Path, trained: Path, evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    folder, text = evaluated
    ledger = world / "store" / "ledger.jsonl"
    before = ledger.read_text()
    assert json.loads(before.splitlines()[0])["what"] == "layers: pretrained, random_init, voxels_alone"
    assert evaluate(LAYERS, str(trained), [f"run.dir={folder}"]) == text
    assert ledger.read_text() == before
    (tmp_path / "layers").mkdir()
    stale = tmp_path / "layers" / "row_999999.npz"  # a picture of another split
    stale.touch()
    evaluate(LAYERS, str(trained), [f"run.dir={tmp_path}", "eval.split=val"])
    assert ledger.read_text() == before
    assert not stale.exists()


def shifted(world: Path, arms: dict[int, float]) -> Any:
    """A prediction that is the device's heights and so many voxels more; gaps are filled by the mean."""

    def predict(self: Planes, decoder: torch.nn.Module, row: int) -> np.ndarray:
        truth = self.volumes.read(row)
        filled = np.where(np.isnan(truth), np.nanmean(truth), truth)
        return (filled + arms[id(decoder)]).astype(np.float32)

    return predict


def test_errors_are_those_of_the_volumes_own_spacing(
    world: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One voxel off is one axial spacing; random is two off; file labels differ from the grid's a little."""
    head = LAYERS.open_head(str(trained), StorageOptions())
    monkeypatch.setattr(Kind, "open_head", lambda *_: head)
    offsets = {id(arm.decoder): 1.0 + number for number, arm in enumerate(head.arms)}
    monkeypatch.setattr(Planes, "predict", shifted(world, offsets))
    command.main(["--head", str(trained), f"run.dir={tmp_path}"])
    content = json.loads((tmp_path / "layers.json").read_text())
    assert 48 < content["overall"][PRETRAINED]["value"] < 49.2  # three phantoms: 48.7, 49.0, 49.1
    assert 96 < content["overall"][RANDOM]["value"] < 97.2
    assert content["against"][RANDOM]["ci95"] == pytest.approx([48, 48], abs=0.05)
    people, start = content["n_participants"], "Pre-training against random initialisation: cannot say, "
    flips = f"because an exact test by sign flips gives p {2 ** (1 - people):.3g}"
    (verdict,) = (text for text in content["verdicts"] if text.startswith(f"{start}{flips}"))
    assert f"{people} participants could have shown no difference, however large." in verdict
    fewest = min(
        cell["people"] for of in content["by_name"][RANDOM].values() for cell in of.values() if cell["people"]
    )
    (caution,) = content["cautions"]  # of the number that rests on the fewest
    assert caution.startswith(f"{fewest} participants are too few: below 12")
    assert f"**{caution}**" in (tmp_path / "layers.md").read_text()
    assert caution in layers_tables(content)[0].note
    lines = pd.read_parquet(tmp_path / "surfaces.parquet")
    of_arm = lines[(lines.arm == PRETRAINED) & (lines.what == "surface")]
    assert of_arm.hd95_um.between(48, 70).all()  # 55 to 68
    # a shift changes no thickness: the sectors are the device's own, but for what the coarse grid flattens
    sectors = pd.read_csv(tmp_path / "etdrs.csv")
    assert set(SECTORS) < set(sectors.columns)
    assert sectors.centre.notna().any()
    apart = content["etdrs"][PRETRAINED]  # the device's holes and rim are filled
    assert apart.pop("retina") < 5.5
    assert max(apart.values()) < 2.6


def test_the_page_says_on_what_it_was_measured(
    trained: Path, evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    """Where the maps' manifest is gone, on the grid: another question than that of the scans' own voxels."""
    folder, text = evaluated
    own = json.loads((folder / "layers.json").read_text())
    assert own["measured_on"] == "scan"
    assert "Measured at the scans' own B-scans, rows and A-scans, against the labels of the files" in text
    place = tmp_path / "gone" / "manifest.tsv"
    text = evaluate(LAYERS, str(trained), [f"run.dir={tmp_path}", f"data.octa_manifest_path={place}"])
    content = json.loads((tmp_path / "layers.json").read_text())
    assert content["measured_on"] == "grid"
    assert "**Measured on the grid of the store, against labels laid on it, not at the scans' own" in text
    assert str(place) in text
    for arm, part in own["overall"].items():
        assert content["overall"][arm]["value"] == pytest.approx(part["value"], rel=0.03)
        assert content["overall"][arm]["value"] != part["value"]


@pytest.mark.parametrize("planes_more", [0, 1])  # an odd grid, and an even one
def test_heights_of_apart_b_scans_come_back_to_the_file(tmp_path: Path, planes_more: int) -> None:
    """An odd number of B-scans, as far apart as planes: what is laid comes back as it is in the file."""
    make_tree(tmp_path / "tree", 12, (), (MAESTRO,), (11, 72, 16))
    cfg = config(tmp_path, "task.kind=layers")
    listed = read_records(cfg).records[0]
    d_mm, h_mm, w_mm = open_record(listed, StorageOptions())[0].spacing_mm
    grid = [f"spatial.target_spacing=[{d_mm},{h_mm},{w_mm}]", "spatial.patch_size=[1,8,8]"]
    grid += [f"spatial.image_size=[{11 + planes_more},72,16]"]
    prepare_all(tmp_path, *grid)
    volumes = read_volumes(config(tmp_path, "task.kind=layers", *grid), PreparedStore.open(cfg.data.store))
    own = OnScan.open(cfg, volumes)
    for row in map(int, volumes.rows):
        truth, back = own.volumes.read(row), own.bring(row, volumes.read(row), None)
        assert truth.shape == back.shape == (len(volumes.names), 11, 16)
        assert np.nanstd(truth, axis=1).max() * h_mm * 1000 > 5  # B-scans differ
        assert boundary_error_um(back, truth, h_mm).max() < 1


def test_people_whose_surfaces_no_training_volume_has(
    world: Path, trained: Path, evaluated: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a random encoder they have no error to compare with: all of them, then one."""
    head = LAYERS.open_head(str(trained), StorageOptions())
    nothing = {key: [None] * len(head.names) for key in head.state["mean_heights"]}
    alone = replace(head, arms=head.arms[:1], state=head.state | {"mean_heights": nothing})
    monkeypatch.setattr(Kind, "open_head", lambda *_: alone)
    monkeypatch.setattr(Planes, "predict", shifted(world, {id(alone.arms[0].decoder): 1.0}))
    text = evaluate(LAYERS, str(trained), [f"run.dir={tmp_path}"])
    content = json.loads((tmp_path / "layers.json").read_text())
    assert content["against"] == {MEAN: {"value": None, "ci95": None, "people": 0, "better": 0}}
    assert (
        "No difference from mean heights of the training volumes can be shown: no participant has a value of"
        in text
    )
    lines = pd.read_parquet(evaluated[0] / "surfaces.parquet")
    lines = lines[~lines.arm.isin([RANDOM, ALONE])].assign(
        error_um=lines.arm.map({PRETRAINED: 2.0, "mean_heights": 8.0})
    )
    lost = lines.person_id == lines.person_id.iloc[0]
    lines.loc[lost & (lines.arm == "mean_heights"), "error_um"] = np.nan
    lines.loc[lost & (lines.arm == PRETRAINED), "error_um"] = 50.0
    answered = answer(LAYERS, Examined(head.cfg, volumes_of(world), alone, lines, {}))
    assert answered["against"][MEAN]["value"] == 6
    assert answered["against"][MEAN]["people"] == answered["n_participants"] - 1
    (verdict, other) = answered["verdicts"]
    assert verdict.startswith("The head ")  # no random encoder: no word of what pre-training gains
    assert other == NOT_ASKED
    assert "labels of a machine" in markdown(LAYERS, answered | {"overlap": 0, "look": None})
    monkeypatch.setattr(StoredHeights, "source", OF_LABELS)  # a person's, say
    lines = lines.assign(arm=lines.arm.replace("device", "labels"))
    answered = answer(LAYERS, Examined(head.cfg, volumes_of(world), alone, lines, {}))
    page = markdown(LAYERS, answered | {"overlap": 0, "look": None})
    assert "Heights are the files of label_surfaces" in page
    assert "mean difference from the labels, um" in page
    assert "device" not in page


@pytest.mark.parametrize("people", [*range(2, 11), 15])
def test_decoders_claim_nothing_of_a_cohort_without_a_difference(world: Path, people: int) -> None:
    """Half of the cohorts of 2 people, 26 % of 3 and 14 % of 5 would, by the interval alone."""
    cfg = config(world, "task.kind=layers")
    examined = Examined(cfg, None, None, pd.DataFrame(), {})  # type: ignore[arg-type]  # a gain asks for people
    examined.__dict__["people"] = [f"p{n}" for n in range(people)]
    gains = np.random.default_rng(people).normal(size=(200, people))
    sentences = [examined.gain(gains_P, "random initialisation", "Dice")[1] for gains_P in gains]
    claims = [text for text in sentences if re.match("Pre-training (beats|is worse)", text)]
    assert len(claims) < 0.07 * len(gains)


def test_devices_share_surfaces_by_name(world: Path) -> None:
    """A Cirrus has two of the surfaces: the others are NaN in its volumes, its one layer is the retina."""
    volumes = volumes_of(world)
    index = volumes.store.index.loc[volumes.rows]
    assert set(index.device) == {"topcon_maestro2", "topcon_triton", "zeiss_cirrus"}
    assert " ".join(volumes.names) == "ILM RNFL/GCL GCL IPL/INL OPL ELM IS/OS OS/RPE RPE BM CSI"
    row = int(index.index[index.device == "zeiss_cirrus"][0])
    is_marked = ~np.isnan(volumes.read(row)).all(axis=(1, 2))
    assert [n for n, marked in zip(volumes.names, is_marked, strict=True) if marked] == ["ILM", "RPE"]
    assert volumes.layers(row) == {"ILM to RPE": (0, 8), "retina": (0, 8)}
    other = int(index.index[index.device == "topcon_triton"][0])
    assert "OPL to ELM" in volumes.layers(other)
    assert volumes.layers(other)["retina"] == (0, 9)
    people = [set(volumes.people(fold)) for fold in (TRAIN, VAL, EVALUATED)]
    assert not people[0] & people[1]
    assert not people[0] & people[2]
    chosen = volumes_of(world, "task.names=[ILM,BM]")
    assert set(chosen.store.index.loc[chosen.rows].device) == set(index.device)
    np.testing.assert_array_equal(chosen.read(other), volumes.read(other)[[0, 9]])


OWN = {"RNFL/GCL": "RNFL_GCL", "IPL/INL": "IPL INL", "ELM": "Aussengrenze", "IS/OS": "EZ", "CSI": "9"}


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        (lambda own: own, (), "ILM RNFL_GCL GCL IPL~INL OPL Aussengrenze EZ OS/RPE RPE BM 9"),
        (lambda own: own, ("task.names=[ILM,EZ]",), "ILM EZ"),
        (lambda own: own if len(own) < 10 else (*own[1::-1], *own[2:]), (), r"expected one order .* in all"),
        (
            lambda own: own,
            ("task.names=[EZ,ILM]",),
            "expected surfaces from the vitreous down, found ILM above",
        ),
    ],
)
def test_surfaces_of_label_files_keep_their_names_and_order(
    world: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: tuple[str, ...], expected: str
) -> None:
    """Names that no device knows are as good as others; files that disagree, or run upwards, are refused."""
    stored = StoredHeights.names
    monkeypatch.setattr(
        StoredHeights, "names", lambda self, row: change(tuple(OWN.get(n, n) for n in stored(self, row)))
    )
    monkeypatch.setattr(StoredHeights, "source", OF_LABELS)
    if expected.startswith("expected"):
        with pytest.raises(UserError, match=r"task\.names: " + expected):
            volumes_of(world, *words)
        return
    assert volumes_of(world, *words).names == tuple(n.replace("~", " ") for n in expected.split(" "))


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_what_lies_on_volumes_is_no_label(world: Path, kind: str) -> None:
    """Commands that compare labels say who takes this kind."""
    cfg = config(world, f"task.kind={kind}")
    with pytest.raises(ConfigError, match=f"expected a kind with labels, found {kind}"):
        read_cohort(cfg, PreparedStore.open(cfg.data.store))


def test_surfaces_that_no_map_names_are_an_error(world: Path) -> None:
    with pytest.raises(UserError, match=r"task\.names: expected some of .*ILM.*found PR2"):
        volumes_of(world, "task.names=[ILM,PR2]")


def test_heights_of_a_volume_that_changed_are_refused(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "store", tmp_path / "store")
    table = pd.read_parquet(tmp_path / "store" / "heights.parquet")
    table.loc[0, "volume"] = "0" * 32
    table.to_parquet(tmp_path / "store" / "heights.parquet")
    cfg = config(world, "task.kind=layers")
    store = PreparedStore.open(str(tmp_path / "store"))
    assert len(StoredHeights.open(str(tmp_path / "store")).index) == 12
    with pytest.raises(UserError, match="found older ones in 1 rows"):
        read_volumes(cfg, store)


def test_seen_people_are_refused(world: Path, trained: Path, tmp_path: Path) -> None:
    person = volumes_of(world).people(EVALUATED)[0]
    save_checkpoint(config(world, f"run.dir={tmp_path / 'seen'}"), participants=[person])
    words = overrides(world, tmp_path / "run", f"model.checkpoint={tmp_path / 'seen'}")
    with pytest.raises(
        UserError, match=f"no participant of split test in its pre-training, found 1 .{person}"
    ):
        train_command.train(str(CONFIG), words)


def test_people_of_the_heads_own_training_are_refused(
    world: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = LAYERS.open_head(str(trained), StorageOptions())
    person = volumes_of(world).people(EVALUATED)[0]
    head.state["participants"]["train"].append(person)
    monkeypatch.setattr(Kind, "open_head", lambda *_: head)
    with pytest.raises(UserError, match=f"no participant of split test in its training, found 1 .{person}"):
        evaluate(LAYERS, str(trained), [f"run.dir={tmp_path}"])
    text = evaluate(LAYERS, str(trained), [f"run.dir={tmp_path}", "eval.allow_overlap=true"])
    assert "**1 evaluated participants were seen in training.**" in text


def test_a_plane_has_its_own_tokens_voxels_and_heights(world: Path, tmp_path: Path) -> None:
    cfg = config(world, "task.kind=layers", f"run.dir={tmp_path / 'run'}")
    volumes = volumes_of(world)
    encoder = random_encoder(cfg, 3)
    kept = KeptFeatures(encoder, cfg, volumes.store, RUNTIME)
    reader = Planes(cfg, kept, volumes, RUNTIME.device)
    row = int(volumes.of(VAL)[0])
    view = plain_view(next(evaluation_batches(cfg, volumes.store, np.array([row]), 1)))
    tokens, voxels = reader.inputs([(row, 1)])
    with torch.no_grad():
        expected = encoder(view)[0].reshape(2, 6, 4, 48)[1]
    torch.testing.assert_close(tokens[0], expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(voxels[0], view[0, 0, 4:8], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(
        reader.truth([(row, 1)])[0], torch.from_numpy(volumes.read(row)[:, 4:8]), equal_nan=True
    )


def test_an_encoder_is_trained_with_its_decoder(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arms move by batches of whole volumes; the file holds what was best, without a checkpoint."""
    seen: list[list[tuple[int, int]]] = []
    whole = Planes.batch
    monkeypatch.setattr(
        Planes, "batch", lambda self, chosen, *m: (seen.append(chosen), whole(self, chosen, *m))[1]
    )
    words = overrides(world, tmp_path / "tuned", "train.max_steps=4", "finetune.encoder=trained")
    assert train_command.main(["--config", str(CONFIG), *words]) == 0
    source = open_source(str(CONFIG), words)
    assert len(seen) == 8
    assert seen[:4] == seen[4:]
    volumes = volumes_of(world)
    for batch in seen:
        rows = {row for row, _ in batch}
        assert len(rows) == 2
        assert sorted(batch) == [(row, plane) for row in sorted(rows) for plane in (0, 1)]
        assert rows <= set(volumes.of(TRAIN).tolist())
    asked = "finetuning.heads.head_file.find_checkpoint"
    monkeypatch.setattr(asked, lambda *_: pytest.fail("the checkpoint was asked for"))
    head = LAYERS.open_head(str(tmp_path / "tuned"), StorageOptions())
    for arm in head.arms:
        start = encoder_of(arm.name, source.cfg, source.state, source.url).state_dict()
        end = arm.encoder.state_dict()
        assert [name for name in start if torch.equal(start[name], end[name])] == []
        kept = KeptFeatures(arm.encoder, head.cfg, volumes.store, RUNTIME)
        reader = Planes(head.cfg, kept, volumes, RUNTIME.device)
        predicted = [(row, reader.predict(arm.decoder, row)) for row in map(int, volumes.of(VAL))]
        error = validation_error(volumes, predicted)["error_um"]
        assert error == pytest.approx(head.state["validation"][arm.name]["error_um"], rel=2e-2)
    text = evaluate(LAYERS, str(tmp_path / "tuned"), [f"run.dir={tmp_path}"])
    assert "The encoder of each arm was trained with its decoder." in text


TRAINED_BY_THREE = "finetune.encoder=trained train.per_core_batch_size=1 train.global_batch_size=3"


def test_another_encoder_is_refused(world: Path, trained: Path, tmp_path: Path) -> None:
    cfg = config(world, f"run.dir={tmp_path / 'other'}")
    save_checkpoint(cfg, lambda model: torch.nn.init.zeros_(model.target_encoder.norm.weight))
    with pytest.raises(CheckpointError, match="the head was trained on another checkpoint"):
        evaluate(LAYERS, str(trained), [f"model.checkpoint={tmp_path / 'other'}", f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"task\.names: expected"):
        evaluate(LAYERS, str(trained), ["task.names=[ILM,BM]", f"run.dir={tmp_path}"])


@pytest.mark.parametrize(
    ("kind", "word", "message"),
    [
        ("layers", "head.kind=mlp", "head.kind: expected linear, upsampling or unetr with task.kind"),
        ("layers", "head.kind=linear", "head.voxels: expected false with head.kind linear"),
        ("layers", "head.voxels=false", "head.voxels: expected true with head.kind unetr"),
        ("layers", "data.sampling=device_balanced", r"data\.sampling: expected its default natural"),
        ("layers", "train.ckpt_every_epochs=2", r"expected its default 5 .*\(a checkpoint is after each"),
        ("layers", "train.activation_checkpointing=true", "expected its default False"),
        ("layers", "task.label_column=x", "labels lie on the volumes of the store"),
        ("translation", "train.compile=true", "neither encoder nor decoder is compiled"),
        ("layers", "task.names=[ILM]", "task.names: expected null, or 2 or more different names"),
        ("layers", "eval.protocol=crossfit", "eval.protocol: expected official"),
        ("layers", "task.kind=classification", "head.kind: expected linear, mlp or attentive"),
        ("segmentation", "task.names=[]", "task.names: expected null, or 1 or more different"),
        ("segmentation", "finetune.layer_decay=0.5", "expected its default"),
        ("translation", "finetune.class_weights=none", r"finetune\.class_weights"),
        ("layers", TRAINED_BY_THREE, r"train\.global_batch_size: expected a multiple of 2"),
    ],
)
def test_keys_that_do_not_fit(world: Path, tmp_path: Path, kind: str, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_command.train(str(CONFIG.with_stem(kind)), overrides(world, tmp_path, *word.split()))


def planes(seed: int = 0, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [2, 3, 4, E] and voxels [2, d, 12, 32]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, 3, 4, width, generator=generator)
    return tokens, torch.randn(2, PATCH[0], 12, 32, generator=generator)


def test_a_linear_decoder_reads_a_token_for_its_own_patch() -> None:
    decoder = decoders.build_decoder("linear", 6, 3, PATCH, 8, voxels=False)
    tokens, voxels = planes()
    before = decoder(tokens, voxels)
    assert before.shape == (2, 3, 2, 12, 32)
    changed = tokens.clone()
    changed[1, 2, 1] += torch.arange(6.0)
    differs = (decoder(changed, voxels) != before).nonzero()
    assert set(differs[:, 0].tolist()) == {1}
    assert (differs[:, 3].min(), differs[:, 3].max()) == (8, 11)
    assert (differs[:, 4].min(), differs[:, 4].max()) == (8, 15)


@pytest.mark.parametrize("voxels", [True, False])
def test_an_upsampling_decoder_reads_voxels_where_asked(voxels: bool) -> None:
    decoder = decoders.build_decoder("upsampling", 6, 3, PATCH, 8, voxels=voxels)
    tokens, seen = planes()
    logits = decoder(tokens, seen)
    assert logits.shape == (2, 3, 2, 12, 32)
    assert torch.equal(decoder(tokens, seen + 1), logits) is not voxels
    assert not torch.equal(decoder(tokens + torch.arange(6.0), seen), logits)
    decoders.surface_loss(logits, torch.full((2, 3, 2, 32), 4.0)).backward()
    assert all(p.grad is not None for p in decoder.parameters())


def unetr(width: int = 6) -> tuple[decoders.UnetrDecoder, torch.Tensor, torch.Tensor]:
    """A decoder of three surfaces with tokens [2, 8, 4, width] and voxels [2, d, 64, 64]; column stride 2."""
    words = ["task.kind=layers", "head.kind=unetr", "head.voxels=true", "head.hidden=4"]
    geometry = ["spatial.patch_size=[2,8,16]", "spatial.image_size=[4,64,64]"]
    cfg = config(Path("nowhere"), *words, *geometry, "spatial.target_spacing=[0.1,0.03,0.045]")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 8, 4, width, generator=generator)
    torch.manual_seed(0)
    return decoders.UnetrDecoder(cfg, width, 3), tokens, torch.randn(2, 2, 64, 64, generator=generator)


@pytest.mark.parametrize("width", [6, 0])
def test_a_unetr_decoder_reads_tokens_and_the_whole_height(width: int) -> None:
    """In training at the columns that it reads, with the layers as classes; a B-scan reads itself alone."""
    decoder, tokens, voxels = unetr(width)
    torch.manual_seed(1)  # which B-scans' tokens are read in training
    logits = decoder(tokens, voxels)
    assert logits.shape == (2, 6, 2, 64, 32)
    decoders.surface_loss(logits, torch.linspace(5, 50, 3).reshape(3, 1, 1).expand(2, 3, 2, 64)).backward()
    assert all(p.grad is not None for p in decoder.parameters())
    assert decoder.eval()(tokens, voxels).shape == (2, 3, 2, 64, 64)
    decoder.is_relative = False  # or all voxels of a B-scan change
    before = decoder.outputs(tokens, voxels)
    changed = voxels.clone()
    changed[0, 1, 60] += 5
    differs = (decoder.outputs(tokens, changed) != before).nonzero()
    assert {tuple(pair) for pair in differs[:, [0, 2]].tolist()} == {(0, 1)}
    assert differs[:, 3].min() == 0  # 60 rows above
    assert torch.equal(decoder.outputs(tokens + torch.arange(float(width)), voxels), before) is (width == 0)
    mirrored = decoder(tokens.flip(2), voxels.flip(3)).flip(4)
    torch.testing.assert_close(mirrored, decoder(tokens, voxels))


def test_layers_between_surfaces_are_classes_too() -> None:
    """The loss of classes is 0 where they are certain, and knows nothing of A-scans with a gap."""
    truth = torch.tensor([[2.5, 5.0], [4.0, torch.nan]]).reshape(1, 2, 1, 2)
    place = torch.zeros(1, 2, 1, 8, 2)
    place[0, 1, 0, 3:4] = 1  # voxel 3 alone lies between them
    certain = 60 * (2 * torch.stack([1 - place[:, 1], place[:, 1]], dim=1) - 1)
    assert decoders.layer_loss(certain, truth).item() == pytest.approx(0, abs=1e-4)
    logits = torch.zeros_like(certain, requires_grad=True)
    decoders.layer_loss(logits, truth).backward()
    assert logits.grad is not None
    assert bool((logits.grad[..., 0] != 0).all())
    assert bool((logits.grad[..., 1] == 0).all())


def test_truth_and_tokens_move_with_the_voxels() -> None:
    """Voxels that know their surface know it after; unknown heights stay unknown, and what is outside is."""
    size, width, count = 64, 48, 5
    moves = Moves.draw((0, 3), count, 1.0, torch.device("cpu"))
    assert torch.equal(Moves.draw((0, 3), count, 1.0, torch.device("cpu")).theta_B23, moves.theta_B23)
    assert not torch.equal(Moves.draw((0, 4), count, 1.0, torch.device("cpu")).theta_B23, moves.theta_B23)
    assert len({row.sign().item() for row in moves.theta_B23[:, 0, 0]}) == 2
    assert moves.bend_BK.std() > 0
    dim = replace(moves, gain_B3=torch.tensor([[1.0, 0, 0]]).expand(count, 3), is_blurred=False)
    plain = replace(dim, box_B6=0 * moves.box_B6, band_B4=0 * moves.band_B4)
    flat = 1 + torch.rand(count, 2, size, width)
    assert (dim.voxels(flat) < plain.voxels(flat)).any() == (
        moves.box_B6[:, 5] + moves.band_B4[:, 3] > 0
    ).any()
    assert (dim.voxels(flat) <= plain.voxels(flat) + 1e-6).all()
    columns = torch.arange(width)
    truth = (30 + 5 * torch.sin(columns / 7)).expand(count, 1, 2, width).clone()
    rows = torch.arange(size).float()[:, None]
    depth = plain.voxels((rows - truth[:, 0, :, None]).contiguous())  # 0 at the surface
    heights = plain.heights(truth, size)[:, 0]
    inside = (heights > 1) & (heights < size - 2)
    assert inside.float().mean() > 0.8
    low = heights.nan_to_num().clamp(0, size - 2).long().unsqueeze(2)
    share = heights.nan_to_num().unsqueeze(2) - low
    at = torch.lerp(depth.gather(2, low), depth.gather(2, low + 1), share)[:, :, 0]
    assert at[inside].abs().mean() < 0.3
    gap = torch.where(columns < 20, torch.nan, truth)
    assert (plain.heights(gap, size).isnan().sum() > 100).item()
    classes = (rows > truth[:, 0, :, None]).to(torch.uint8)
    moved = plain.classes(classes, 255)
    assert moved.dtype == torch.uint8
    known = moved != 255
    assert ((depth > 0) == (moved == 1))[known].float().mean() > 0.97
    outside = plain.columns(truth).isnan()[:, 0]
    assert torch.equal(outside, (moved == 255).all(dim=2))
    tokens = plain.tokens(torch.arange(8.0)[None, :, None, None].expand(count, 8, 6, 2).contiguous())
    wide = plain.voxels(torch.arange(8.0).repeat_interleave(8)[None, None, :, None].expand(count, 1, 64, 48))
    coarse = torch.nn.functional.avg_pool2d(wide, 8)[:, 0]
    assert (tokens[..., 0] - coarse).abs().mean() < 0.1


def test_heights_are_ordered_and_where_the_probability_is() -> None:
    logits = torch.full((1, 3, 1, 12, 2), -30.0)
    for surface, h in enumerate((2, 7, 5)):
        logits[0, surface, 0, h] = 30.0
    assert decoders.heights_of(logits)[0, :, 0, 0].tolist() == pytest.approx([2, 7, 7])
    half = torch.full((1, 1, 1, 12, 1), -30.0)
    half[0, 0, 0, 3:5] = 30.0
    assert decoders.heights_of(half).item() == pytest.approx(3.5)
    two = torch.tensor([0.0, 0.3, 0, 0, 0, 0, 0.7, 0]).log().reshape(1, 1, 1, 8, 1)
    assert decoders.heights_of(two).item() == pytest.approx(4.5)
    assert decoders.heights_of(decoders.at_median(two)).item() == pytest.approx(6 + 0.2 / 0.7 - 0.5, abs=1e-3)
    random = decoders.heights_of(torch.randn(2, 5, 2, 12, 8))
    assert bool((random.diff(dim=1) >= 0).all())


def test_the_loss_is_least_at_the_truth_and_leaves_gaps_out() -> None:
    """Descent on the logits themselves ends at fractional heights; NaN and places outside move nothing."""
    truth = torch.tensor([3.25, 8.5, float("nan"), 40.0]).reshape(1, 1, 1, 4)
    logits = torch.zeros(1, 1, 1, 12, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(150):
        optimizer.zero_grad()
        decoders.surface_loss(logits, truth).backward()
        optimizer.step()
    assert logits.grad is not None
    assert bool((logits.grad[..., 2:] == 0).all())
    assert decoders.heights_of(logits)[0, 0, 0, :2].tolist() == pytest.approx([3.25, 8.5], abs=0.1)
    assert decoders.surface_loss(logits, torch.full((1, 1, 1, 4), float("nan"))).item() == 0


def test_files_get_surfaces_in_their_own_rows(world: Path, trained: Path, tmp_path: Path) -> None:
    """Of the volume's own heights, in the order of the file; the device's are near."""
    head = LAYERS.open_head(str(trained), StorageOptions())
    store = PreparedStore.open(head.cfg.data.store)
    chosen = store.index[store.index.flipped_d][:1].index.tolist() or [int(store.kept[0])]
    row = chosen[0]
    path = world / "tree" / store.index.path[row]
    words = ["--checkpoint", str(trained), "--out", str(tmp_path), "data.workers=0"]
    with pytest.raises(UserError, match=r"--occlusion: expected a head of labels, found one of layers"):
        predict_command.main([*words, "--occlusion", "--dicom", str(path)])
    assert predict_command.main([*words, "--dicom", str(path)]) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert (line["task"], line["calibrated"], line["surfaces"]) == ("layers", False, list(head.names))
    with np.load(tmp_path / line["arrays"]) as arrays:
        rows, um = arrays["rows"], arrays["um"]
    record = store.index.loc[row]
    assert rows.shape[1:] == (record.shape_before_d, record.shape_before_w)
    np.testing.assert_allclose(um, (rows + 0.5) * record.spacing_before_h * 1000, rtol=1e-5)
    volumes = volumes_of(world)
    kept = KeptFeatures(head.arms[0].encoder, head.cfg, store, RUNTIME)
    kept.keep_tokens(np.array([row]))
    heights = Planes(head.cfg, kept, volumes, RUNTIME.device).predict(head.arms[0].decoder, row)
    as_scan = rows[:, ::-1] if record.flipped_d else rows
    back = lay_on_grid(as_scan, record, store.attrs["geometry"])
    inner = (slice(None), slice(2, -2), slice(4, -4))
    assert np.nanmedian(np.abs(back - heights)[inner]) < 0.1  # voxels
    assert line["thickness_um"]["retina"] == pytest.approx(
        np.nanmean(um[head.names.index("BM")] - um[head.names.index("ILM")]), rel=1e-4
    )
    assert line["etdrs_um"] is None or set(line["etdrs_um"]["retina"]) == set(SECTORS)
    assert set(line) == documented("surfaces")
    assert (tmp_path / line["picture"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["dicom", "nifti"])
def test_arrays_and_the_fovea_lie_as_the_file_does(
    world: Path, trained: Path, tmp_path: Path, kind: str
) -> None:
    """Of a scan in two files, in other orders, each A-scan has the same surfaces and fovea."""
    path = next((world / "tree" / "retinal_oct").rglob("*.dcm"))
    header, frames = open_record(unknown_record(str(path)), StorageOptions())
    (depth, height, width), step = header.shape, 1 if kind == "dicom" else -1
    order, files = list(range(depth)), [path, tmp_path / "turned" / path.name]
    if kind == "dicom":
        order = interleaved(*files)
    else:
        files = [tmp_path / "a.nii", tmp_path / "b.nii"]
        turned, voxels_WHD = np.diag([-1.0, -1, 1, 1]), np.stack(list(frames)).transpose(2, 1, 0)
        turned[:2, 3] = width - 1, height - 1
        affine = np.diag([-mm for mm in header.spacing_mm[::-1]] + [1.0])
        pairs = (voxels_WHD, affine), (voxels_WHD[::-1, ::-1], affine @ turned)
        for file, pair in zip(files, pairs, strict=True):
            image = nib.Nifti1Image(*pair)
            image.header.set_xyzt_units("mm")
            nib.save(image, file)
            file.with_suffix(".yaml").write_text("laterality: R\nprotocol: macula\n")
    lines, rows_SDW = [], []
    for number, (file, fovea) in enumerate([(files[0], "5,3"), (files[1], f"{order.index(5)},{3 * step}")]):
        fovea = fovea.replace("-3", str(width - 4))
        for name, more in (("given", ["--fovea", fovea]), ("found", [])):
            out = tmp_path / f"{number}{name}"
            words = ["--checkpoint", str(trained), "--out", str(out), "data.workers=0", *more]
            assert predict_command.main([*words, "--files", str(file)]) == 0
            lines.append(json.loads((out / "predictions.jsonl").read_text()))
        assert lines[-2]["fovea"] == [float(place) for place in fovea.split(",")]
        with np.load(out / lines[-1]["arrays"]) as arrays:
            rows_SDW.append(arrays["rows"])
    first, second = rows_SDW
    expected = first[:, order] if step > 0 else height - 1 - first[..., ::-1]
    np.testing.assert_allclose(second, expected, atol=1e-3)
    assert not np.array_equal(first, expected)  # so the order shows
    for name in ("etdrs_um", "thickness_um"):
        for own, other in zip(lines[2:], lines[:2], strict=True):
            pair = (pd.json_normalize(line[name]).to_numpy(float) for line in (own, other))
            np.testing.assert_allclose(*pair, atol=0.01)
    assert lines[0]["etdrs_um"] != lines[1]["etdrs_um"]
    (down, across), place = lines[1]["fovea"], lines[3]["fovea"]
    assert order[round(place[0])] == round(down)
    assert place[1] == pytest.approx(across if step > 0 else width - 1 - across, abs=0.02)
