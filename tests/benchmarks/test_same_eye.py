"""One eye on several devices: planted encoders read 0 and 1, agreement is the published one, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import same_eye as module
from benchmarks.same_eye import choose_eyes, main, nearest
from data_setup.phantom import __main__ as phantom
from data_setup.phantom.cohort import Participant, make_participants
from data_setup.phantom.files import scan_volume
from data_setup.protocols import DEVICES as PROTOCOL_DEVICES
from data_setup.resample import Resampled
from data_setup.store.format import RECORD_COLUMNS
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, measure
from finetuning.cohort.metrics import icc
from finetuning.train import main as train
from tests.support.finetune_factory import CONFIG, SIZE, config, index_store, person, save_checkpoint
from utils.errors import ConfigError, UserError

PEOPLE = {"train": 8, "val": 3, "test": 8}
DEVICES = ("heidelberg_spectralis", "topcon_triton", "zeiss_cirrus")
TASK = str(CONFIG.with_name("cls_linear_probe.yaml"))
QUICK = [
    "train.epochs=2",
    "head.learning_rates=[1e-2]",
    "head.weight_decays=[0.01]",
    "data.workers=0",
    "wandb.mode=disabled",
]


def draw(rng: np.random.Generator, rows: np.ndarray, device: int) -> np.ndarray:
    """Two bright bands of an eye, the second below the first; the device shows in the vitreous."""
    volume = rng.uniform(20, 30, SIZE)
    volume[:, :2] += 15 * device
    volume[:, 4 : 4 + rows[0]] = 200
    volume[:, 13 : 13 + rows[1]] = 120
    return volume.astype(np.uint8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom's store: both eyes of everybody on each of three devices, with labels."""
    root = tmp_path_factory.mktemp("world")
    cfg, rng = config(root, root / "unused"), np.random.default_rng(0)
    records, volumes, lines = [], [], ["person_id\tstudy_group\trecommended_split"]
    for split, count in PEOPLE.items():
        for number in range(count):
            lines.append(f"{person(split, number)}\t{'ab'[number % 2]}\t{split}")
            facts = {"person_id": person(split, number), "split": split, "study_group": "ab"[number % 2]}
            for eye in "LR":
                rows = np.array([1 + number * 7 % 9, 1 + number * 5 % 8])
                for device, device_name in enumerate(DEVICES):
                    name = f"{person(split, number)}_{eye}_{device}"
                    records.append(
                        dict.fromkeys(RECORD_COLUMNS)
                        | facts
                        | {"laterality": eye, "region": "Macula", "protocol": f"macula_{device}"}
                        | {"device": device_name, "path": f"{name}.dcm", "sop_instance_uid": name}
                    )
                    volumes.append(draw(rng, rows, device))
    writer = StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, str(root), synthetic=True)
    rows_ = writer.append_records(records)
    for row, voxels in zip(rows_, volumes, strict=True):
        whole = Resampled(voxels, (0, 8, 0, 24, 0, 32), cfg.spatial.target_spacing, 0.0)
        writer.write_row(row, voxels, measure(whole) | {"status": "kept"})
    writer.finalise(rows_)
    (root / "participants.tsv").write_text("\n".join(lines) + "\n")
    (root / "store" / "prepare_report.json").write_text("{}")  # a run copies it
    return root


class Planted(nn.Module):
    """Tokens that all say the same: what `read` finds in a volume."""

    def __init__(self, read: Callable[[Tensor], Tensor], number: float) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("number", torch.tensor(number))  # kept features are named by the weights

    def forward(self, view_BCDHW: Tensor) -> Tensor:
        return self.read(view_BCDHW).unsqueeze(1).expand(-1, 2 * 3 * 4, -1)


def of_device(view: Tensor) -> Tensor:
    """Brightness of the vitreous against the rows below the first band."""
    level = view[:, 0, :, :2].mean((1, 2, 3)) - view[:, 0, :, 22:].mean((1, 2, 3))
    return torch.stack([level, level**2], dim=1)


def of_anatomy(view: Tensor) -> Tensor:
    """How many rows each band has."""
    profile = view[:, 0].mean((1, 3))
    low, high = profile.amin(1, keepdim=True), profile.amax(1, keepdim=True)
    bright = profile > low + 0.35 * (high - low)
    return torch.stack([bright[:, 3:13].sum(1), bright[:, 13:].sum(1)], 1).float()


@pytest.fixture(scope="module")
def checkpoint(world: Path) -> str:
    small = ["method.predictor_depth=2", "method.predictor_width=64"]
    return save_checkpoint(config(world, world / "pretrained", *small), participants=["train00", "val01"])


def test_a_planted_device_reads_0_and_the_anatomy_1(
    world: Path,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "pretrained_encoder", lambda *_: Planted(of_anatomy, 1.0))
    monkeypatch.setattr(module, "random_encoder", lambda *_: Planted(of_device, 2.0))
    run = tmp_path / "run"
    words = ["--config", str(CONFIG), "--checkpoint", checkpoint, f"data.gcs_root={world}", f"run.dir={run}"]
    words += [f"data.store={world / 'store'}", "spatial.image_size=[8,24,32]", "data.workers=0"]
    main(words)
    assert (run / "same_eye.md").read_text() in capsys.readouterr().out
    result = json.loads((run / "same_eye.json").read_text())
    assert (result["n_participants"], result["n_eyes"], result["n_volumes"]) == (8, 16, 48)
    ledger = (world / "store" / "ledger.jsonl").read_text()
    main(words)
    assert (world / "store" / "ledger.jsonl").read_text() == ledger  # a kept answer is no look
    look = json.loads(ledger.splitlines()[-1])
    assert look["what"].startswith("same_eye: pre-trained encoder")
    assert result["look"] == look["look"]
    assert f"look {look['look']} at these test participants" in (run / "same_eye.md").read_text()
    assert result["protocols"] == {name: f"macula_{number}" for number, name in enumerate(DEVICES)}
    rows = {(row["label"], row["features"] == "as they are"): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 4
    anatomy = rows["pre-trained encoder (EMA target)", True]
    assert anatomy["robustness"]["value"] > 0.9
    assert anatomy["robustness"]["ci95"][0] > 0.8
    device = rows["random initialisation (seed 0)", True]
    assert device["robustness"]["value"] < 0.1
    # the eye on two other devices, and two eyes of each of seven others on this one
    assert device["robustness_chance"] == pytest.approx(2 / (2 + 14))


def test_removing_the_devices_mean_uncovers_the_eye() -> None:
    """Features that are eye + device: the device is all that shows before, the eye after."""
    rng = np.random.default_rng(0)
    people, devices = np.repeat(np.arange(30), 3), np.tile(np.arange(3), 30)
    features = rng.normal(size=(30, 5))[people] + 100 * rng.normal(size=(3, 5))[devices]
    names = np.array([f"p{number:02d}" for number in people])
    before = nearest(features, names, names, devices)
    assert before.same_eye.mean() == 0
    means = np.stack([features[devices == number].mean(axis=0) for number in range(3)])
    assert nearest(features - means[devices], names, names, devices).same_eye.mean() == 1


def test_neighbours_by_hand() -> None:
    """Angles: the fellow eye lies between an eye's two volumes and is no neighbour."""
    degrees = {"p_L a": 0, "p_L b": 20, "p_R a": 10, "q_L a": 14, "q_L b": 90, "r_L c": 21}
    angle = np.deg2rad(list(degrees.values()))
    features = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    eye = np.array([name[:3] for name in degrees])
    close = nearest(
        features, eye, np.array([name[0] for name in degrees]), np.array([n[-1] for n in degrees])
    )
    # p_L a: own eye 20 away, q_L a 14; p_L b: own 20, q_L b 70; q_L a: own 76, p_R a 4;
    # q_L b: own 75, p_L b 70
    assert close.counted.tolist() == [True, True, False, True, True, False]  # p_R, r_L: on one device
    assert close.same_eye.tolist() == [False, True, False, False]
    np.testing.assert_allclose(close.chance, [1 / 2, 1 / 2, 1 / 3, 1 / 2])
    constant = nearest(
        np.ones((4, 2)), np.array(list("aabb")), np.array(list("aabb")), np.array(list("xyxy"))
    )
    assert not constant.same_eye.any()
    with pytest.raises(ValueError, match="both kinds"):
        nearest(np.ones((2, 2)), np.array(["a", "b"]), np.array(["a", "b"]), np.array(["x", "x"]))


def test_agreement_is_that_of_shrout_and_fleiss() -> None:
    """Table 2 and its coefficients in Shrout and Fleiss 1979: ICC(2,1) = .29, ICC(3,1) = .71."""
    ratings = np.array([[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]])
    draws = np.array([[1, 1, 1, 1, 1, 1], [2, 0, 1, 1, 3, 1]])
    both, consistent = icc(ratings.astype(float), draws)
    assert (round(both[0], 2), round(consistent[0], 2)) == (0.29, 0.71)
    again = icc(np.repeat(ratings, draws[1], axis=0).astype(float), np.ones((1, 8), int))
    np.testing.assert_allclose([both[1], consistent[1]], np.ravel(again))
    shifted, same = icc(ratings + np.array([100.0, 0, 0, 0]), draws)
    assert shifted[0] < 0.01  # a device that measures 100 more does not agree
    np.testing.assert_allclose(same, consistent)
    assert np.isnan(icc(np.full((3, 2), 4.0), np.ones((1, 3), int))).all()


@pytest.mark.slow
def test_the_outputs_of_a_head_are_compared(world: Path, checkpoint: str, tmp_path: Path) -> None:
    run = tmp_path / "head"
    assert train(["--config", TASK, "--checkpoint", checkpoint, f"run.dir={run}", *QUICK]) == 0
    main(["--head", str(run)])
    result = json.loads((run / "same_eye.json").read_text())
    assert list(result["head"]["each"]) == ["a", "b"]
    assert result["head"]["eyes"] == 16
    low, high = result["head"]["icc_agreement"]["ci95"]
    assert low <= result["head"]["icc_agreement"]["value"] <= high
    assert result["rows"][0]["label"] == "the head's encoder"
    assert "## Outputs of the head" in (run / "same_eye.md").read_text()
    with pytest.raises(UserError, match=r"split val in its training, found 1 \(val01\)"):
        main(["--head", str(run), "eval.split=val"])


def test_people_of_training_are_refused_or_counted(
    world: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(world, tmp_path / "run", "eval.split=val", "eval.allow_overlap=true")
    with pytest.raises(UserError, match=r"split val in its training, found 1 \(val01\)"):
        module.same_eye(config(world, tmp_path / "run", "eval.split=val"), checkpoint)
    monkeypatch.setattr(module, "robustness", lambda *_: {})
    monkeypatch.setattr(module, "markdown", lambda result: "")
    assert module.same_eye(cfg, checkpoint)["overlap"] == 1
    crossfit = config(world, tmp_path / "run", "eval.protocol=crossfit", "eval.allow_overlap=true")
    with pytest.raises(ConfigError, match="expected official, found crossfit"):
        module.same_eye(crossfit, checkpoint)


def test_a_device_stands_for_one_protocol_and_an_eye_counts_once(world: Path, tmp_path: Path) -> None:
    """Macula before disc where both are as frequent, then the protocol of most eyes; a repeat is left out."""
    plan = [
        ("p1", "L", "a", "disc", "Optic Disc"), ("p1", "L", "a", "zmac", "Macula"),
        ("p1", "L", "b", "wide", "Macula"), ("p1", "L", "b", "wide", "Macula"),
        ("p2", "R", "a", "zmac", "Macula"), ("p2", "R", "a", "disc", "Optic Disc"),
        ("p2", "R", "b", "wide", "Macula"), ("p2", "R", "b", "amac", "Macula"),
        ("p3", "R", "a", "zmac", "Macula"),
        ("t", "R", "a", "zmac", "Macula"), ("t", "R", "a", "disc", "Optic Disc"),
        ("v", "R", "b", "wide", "Macula"), ("p3", "R", "a", "disc", "Optic Disc"),
    ]  # fmt: skip
    names = ("person_id", "laterality", "device", "protocol", "region")
    split = {"t": "train", "v": "val"}
    store = index_store(
        [
            dict(zip(names, line, strict=True)) | {"listed": True, "split": split.get(line[0], "test")}
            for line in plan
        ]
    )
    eyes = choose_eyes(config(world, tmp_path), store)
    assert eyes.protocol_of == {"a": "zmac", "b": "wide"}
    assert eyes.rows.tolist() == [9, 1, 2, 4, 6]
    place, people = eyes.complete()
    assert (place.tolist(), people.tolist()) == ([[0, 1], [2, 3]], ["p1", "p2"])
    with pytest.raises(UserError, match=r"expected 2 eyes or more that two devices .* found 0 among 1"):
        choose_eyes(config(world, tmp_path, "data.device_filter=[a]"), index_store_of(store, "p3"))


def index_store_of(store: PreparedStore, person_id: str) -> PreparedStore:
    """The rows of one person, with those of training and validation."""
    keep = store.index["person_id"].isin([person_id, "t", "v"])
    records = store.index[keep].drop(columns="row").to_dict("records")
    return index_store([dict(record) for record in records])


def test_the_phantom_photographs_each_eye_with_every_device() -> None:
    someone = make_participants(3, 3, every_device=True)[1]
    assert someone.factors == make_participants(3, 3)[1].factors  # the people are the same
    seen = {(scan.laterality, scan.protocol.device) for scan in someone.scans}
    assert seen == {(side, device) for side in "LR" for device in PROTOCOL_DEVICES}
    assert len(someone.scans) == 8
    assert all(scan.protocol.region.startswith("Macula") for scan in someone.scans)
    thick, pixels = [], []
    for scan in someone.scans[2:4]:  # Triton and Cirrus: fields of 6 mm of the right eye
        volume, spacing = scan_volume(someone, scan, 3, "small", (12, 96, 32))
        thick.append(np.diff(volume.surfaces, axis=0).mean(axis=(1, 2)) * spacing[1])
        pixels.append(volume.voxels.astype(float).mean())
    np.testing.assert_allclose(thick[0][:8], thick[1][:8], rtol=0.06)  # one anatomy
    assert abs(pixels[0] - pixels[1]) > 1  # two devices


def test_the_command_asks_the_phantom_for_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def count(person_: Participant, **_: object) -> list[dict[str, object]]:
        planned.append(len(person_.scans))
        return []

    monkeypatch.setattr(phantom, "write_person", count)
    words = ["--participants", "2", "--workers", "0", "--seed", "1"]
    phantom.main(["--out", str(tmp_path / "all"), *words, "--every-device"])
    assert planned == [8, 8]
    assert json.loads((tmp_path / "all" / "synthetic.json").read_text())["every_device"] is True
    phantom.main(["--out", str(tmp_path / "some"), *words])
    assert "every_device" not in json.loads((tmp_path / "some" / "synthetic.json").read_text())
