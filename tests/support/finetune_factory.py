"""A small labelled store and a checkpoint of an untrained model, for tests of finetuning.

A volume is speckle with a band that is thicker in a later class, so a probe can learn it; every participant
has both eyes, and devices are balanced over the classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from data_setup.loader import EVALUATION_BATCH, evaluation_batches
from data_setup.normalisation import plain_view
from data_setup.resample import NEAREST, Resampled
from data_setup.store.format import INDEX_COLUMNS, RECORD_COLUMNS
from data_setup.store.reader import PreparedStore
from data_setup.store.writer import StoreWriter, measure
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.metrics import Predictions
from models.probes.features import pool_tokens
from models.vjepa3d import VJEPA3D
from utils.checkpoint import CheckpointWriter
from utils.config.load import load_config, to_yaml
from utils.config.schema import Config
from utils.runtime.single import Runtime

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smoke_test.yaml"
SIZE = (8, 24, 32)
PEOPLE = {"train": 16, "val": 8, "test": 12}
DEVICES = ("zeiss_cirrus", "topcon_triton")
SITES = ("UW", "UCSD", "UAB")
PREPARED = {"kept": 72, "rejected": {}, "synthetic": True, "run": {"audit": None}}
PREPARED |= {"by_device": {}, "by_protocol": {}}  # prepare_report.json, which a run copies
RUNTIME = Runtime(torch.device("cpu"), use_bf16=False)


def person(split: str, number: int) -> str:
    return f"{split}{number:02d}"


def band_rows(label: int, num_classes: int = 2) -> int:
    """Axial rows of the band of a class: 4 to 13."""
    return 4 + 10 * label // num_classes


def draw(rng: np.random.Generator, label: int, num_classes: int = 2) -> np.ndarray:
    """Speckle over a band that is thicker in a later class; the last 4 axial rows are outside the field."""
    volume = rng.uniform(20, 60, SIZE)
    volume[:, 6 : 6 + band_rows(label, num_classes)] += 120
    volume[:, 20:] = 0
    return volume.astype(np.uint8)


def make_world(root: Path, people: Mapping[str, int] = PEOPLE, classes: str = "ab") -> Path:
    """A store of both eyes of every participant, and participants.tsv; the class is number % len(classes).

    participants.tsv has a column more than AI-READI's: band_rows, a number that the class decides.
    """
    cfg = config(root, root / "unused")
    rng = np.random.default_rng(0)
    records, voxels, lines = [], [], []
    for split, count in people.items():
        for number in range(count):
            label = number % len(classes)
            facts = {
                "person_id": person(split, number),
                "clinical_site": SITES[number % len(SITES)],
                "study_group": classes[label],
                "age": 40 + 7 * number % 50,
            }
            lines.append([*facts.values(), split, band_rows(label, len(classes))])
            for eye in "LR":
                name = f"{person(split, number)}_{eye}"
                records.append(
                    dict.fromkeys(RECORD_COLUMNS)
                    | facts
                    | {"split": split, "laterality": eye, "region": "Macula", "protocol": "p"}
                    | {"device": DEVICES[number // len(classes) % len(DEVICES)]}
                    | {"path": f"{name}.dcm", "sop_instance_uid": name}
                )
                voxels.append(draw(rng, label, len(classes)))
    writer = StoreWriter(cfg.data.store)
    writer.create(cfg.spatial, str(root), synthetic=True)
    rows = writer.append_records(records)
    for row, volume in zip(rows, voxels, strict=True):
        volume_ = Resampled(volume, (0, 8, 0, 20, 0, 32), cfg.spatial.target_spacing, 0.0)
        writer.write_row(row, volume, measure(volume_) | {"status": "kept"})
    writer.finalise(rows)
    header = ["person_id", "clinical_site", "study_group", "age", "recommended_split", "band_rows"]
    table = "".join("\t".join(map(str, line)) + "\n" for line in [header, *lines])
    (root / "participants.tsv").write_text(table)
    (root / "store" / "prepare_report.json").write_text(json.dumps(PREPARED))
    return root


def write_labels(path: Path, label: Callable[[str, int], str]) -> None:
    """A table of the participants of PEOPLE with another study_group: label(split, number)."""
    lines = [f"{person(s, n)}\t{label(s, n)}\t{s}\n" for s, count in PEOPLE.items() for n in range(count)]
    path.write_text("person_id\tstudy_group\trecommended_split\n" + "".join(lines))


def config(root: Path, run: Path, *overrides: str) -> Config:
    """The smoke test's configuration for the store of make_world, with a grid of 2 x 3 x 4."""
    # no workers: one imports torch, which takes longer than the test
    small = ["spatial.image_size=[8,24,32]", "data.workers=0", "train.use_bf16=false"]
    place = [f"data.gcs_root={root}", f"data.store={root / 'store'}", f"run.dir={run}"]
    return load_config(CONFIG, [*small, *place, *overrides])


def save_checkpoint(cfg: Config, change: Callable[[VJEPA3D], None] = lambda model: None, **state: Any) -> str:
    """A checkpoint as pre-training writes it, of an untrained model after `change`; returns its URL."""
    torch.manual_seed(123)
    model = VJEPA3D(cfg)
    change(model)
    assert cfg.train.ckpt_dir is not None
    writer = CheckpointWriter(cfg.train.ckpt_dir, keep_last=1)
    content = {
        "step": 40,
        "model": model.state_dict(),
        "config": to_yaml(cfg),
        "normalisation": "zscore_valid",
        "planes": NEAREST,
        "participants": [person("train", n) for n in range(PEOPLE["train"])],
    }
    writer.save(content | state, ["best_probe"])
    writer.close()
    return f"{cfg.train.ckpt_dir}/best_probe.pt"


@torch.no_grad()
def silence(module_: nn.Module) -> None:
    """All weights zero: every volume has the same features."""
    for parameter in module_.parameters():
        parameter.zero_()


def index_store(records: Sequence[Mapping[str, Any]]) -> PreparedStore:
    """A store that is an index alone, a row for each record: nothing can be read from its volumes."""
    empty: dict[str, Any] = {"str": "", "bool": True, "int64": 0, "float64": 0.0}
    rows = [
        {name: empty[kind] for name, (kind, _) in INDEX_COLUMNS.items()}
        | {"row": number, "status": "kept", "checksum": f"{number:032x}", "laterality": "L"}
        | {"sop_instance_uid": f"1.2.{number}", "path": f"scans/{number}.dcm", "device": DEVICES[0]}
        | dict(record)
        for number, record in enumerate(records)
    ]
    index = pd.DataFrame(rows).astype({name: kind for name, (kind, _) in INDEX_COLUMNS.items()})
    return PreparedStore("memory://store", None, None, {}, index.set_index("row", drop=False))


@torch.no_grad()
def embed_rows(
    encoder: nn.Module, cfg: Config, store: PreparedStore, rows: np.ndarray, runtime: Runtime
) -> np.ndarray:
    """Mean and standard deviation over valid tokens, float32 [n, 2E], in the order of `rows`."""
    features = []
    for batch in map(runtime.to_device, evaluation_batches(cfg, store, rows, EVALUATION_BATCH)):
        with runtime.autocast():
            tokens = encoder(plain_view(batch))
        features.append(runtime.to_torch(pool_tokens(tokens.float(), batch["context_valid"])).cpu())
    return torch.cat(features).numpy()


def three_folds(seed: int, people: int = 36) -> list[Cohort]:
    """Crossfit over people with a volume each, of two classes: fold k is evaluated, k + 1 is val."""
    part = np.random.default_rng(seed).permutation(people) % 3
    names = np.array([f"p{number:02d}" for number in range(people)])
    target = (np.arange(people) % 2).astype(float)[:, None]
    order = {0: EVALUATED, 1: VAL, 2: TRAIN}
    return [
        Cohort(
            "classification",
            ("a", "b"),
            np.arange(people),
            np.array([order[(number - k) % 3] for number in part]),
            target,
            names,
            names,
        )
        for k in range(3)
    ]


def predictions(kind: str, truth: Any, scores: Any, person: Any = None) -> Predictions:
    """Scores [U, C] of units with this truth [U] or [U, T]; of `person` [U], or one person each."""
    unit = np.array([f"u{number:04d}" for number in range(len(truth))])
    truth, scores = np.asarray(truth, float).reshape(len(truth), -1), np.asarray(scores, float)
    names = tuple("abcdefg"[: scores.shape[1]])
    return Predictions(kind, names, unit, unit if person is None else np.asarray(person), truth, scores)


def noise(trial: int, seed: int, people: int = 36) -> np.ndarray:
    """Features of a random encoder that know nothing, [people, 6]."""
    return np.random.default_rng([trial, seed]).normal(size=(people, 6)).astype(np.float32)


def assert_no_gain(gains: Sequence[float]) -> None:
    """Whoever chooses without having seen the evaluated people gains nothing on noise."""
    error = np.std(gains, ddof=1) / np.sqrt(len(gains))
    assert abs(np.mean(gains)) < 2 * error, f"{np.mean(gains):+.3f}, standard error {error:.3f}"


def image_encoder(folder: Path) -> str:
    """A Hugging Face image encoder of a tiny configuration with random weights."""
    from transformers import ViTConfig, ViTModel

    tiny = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32
    )
    ViTModel(tiny, add_pooling_layer=False).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    return str(folder)
