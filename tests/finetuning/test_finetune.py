"""Full fine-tuning learns what is planted, goes on exactly, and reads nothing that is to be evaluated."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_setup.store.reader import PreparedStore, VolumeReader
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.source import Source, open_source
from finetuning.heads import finetune as loop
from finetuning.heads.confidence import Calibration, stored_calibration, stored_familiarity
from finetuning.heads.finetune import finetune
from finetuning.heads.head_file import open_head, predict_rows
from finetuning.heads.objective import METRICS, metric_name
from finetuning.heads.tuning import Examples, TunedModel, layer_groups, open_tuning, settle_memory
from models.vjepa3d import build_encoder
from models.weights.shape import with_features
from tests.support.finetune_factory import RUNTIME, config, make_world, save_checkpoint
from tests.support.model_factory import small_config, volumes
from tests.support.process_factory import without_clock
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config
from utils.errors import EXIT_STOPPED, UserError
from utils.report import cli as report
from utils.report.run_files import TASK_SCORES, read_run
from utils.run import skipped_updates
from utils.runtime.processes import Group
from utils.runtime.single import Runtime

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cls_finetune.yaml"
EPOCH = 4  # updates: 32 volumes in batches of 8
NOISE = ("method.drop_path=0.2", "method.dropout=0.1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_world(tmp_path_factory.mktemp("world"))
    save_checkpoint(config(root, root / "pretrained"))
    return root


def open_task(world: Path, run: Path, *overrides: str) -> Source:
    return open_source(
        CONFIG,
        [
            f"model.checkpoint={world / 'pretrained'}",
            f"run.dir={run}",
            "train.global_batch_size=8",
            "train.per_core_batch_size=8",
            "train.epochs=3",
            "train.use_bf16=false",
            "train.log_every_steps=1",
            "optim.base_lr=3e-3",
            "data.workers=0",
            "wandb.mode=disabled",
            *overrides,
        ],
    )


def read_folds(store: PreparedStore, kind: str = "classification") -> Cohort:
    """The world's participants, of which every second one is ill; a value of an ill one is 5, else 1."""
    index = store.index.loc[store.kept]
    fold = index["split"].map({"train": TRAIN, "val": VAL, "test": EVALUATED}).to_numpy()
    person = index["person_id"].to_numpy(str)
    is_ill = np.array([int(p[-2:]) % 2 for p in person], dtype=float)[:, None]
    target = {"regression": 1 + 4 * is_ill, "multilabel": np.hstack([is_ill, 1 - is_ill])}.get(kind, is_ill)
    names = ("thickness",) if kind == "regression" else ("a", "b")
    return Cohort(kind, names, index.index.to_numpy(), fold, target, person, person)


def run_task(world: Path, run: Path, *overrides: str, kind: str = "classification") -> int:
    source = open_task(world, run, f"task.kind={kind}", *overrides)
    store = PreparedStore.open(source.cfg.data.store)
    return finetune(source, store, read_folds(store, kind), Runtime(RUNTIME.device, use_bf16=False))


def metrics(run: Path, name: str = "") -> dict[int, dict[str, Any]]:
    """Lines by step that have this metric, without those of the clock."""
    return {row["step"]: row for row in without_clock(run) if not name or name in row}


def saved(run: Path, name: str) -> dict[str, Any]:
    return load_checkpoint(str(run / "checkpoints" / f"{name}.pt"))


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close((a["model"], a["optimizer"]), (b["model"], b["optimizer"]), rtol=0, atol=0)


@pytest.fixture(scope="module")
def rows_read() -> set[int]:
    return set()


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory, rows_read: set[int]) -> Path:
    """An uninterrupted run of 12 updates, with all that is drawn at random; it notes what it reads."""
    run = tmp_path_factory.mktemp("finished")
    real = VolumeReader.read

    def read(reader: VolumeReader, row: int, compare: bool = False) -> np.ndarray:
        rows_read.add(row)
        return real(reader, row, compare)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VolumeReader, "read", read)
        assert run_task(world, run, *NOISE, "train.ckpt_every_steps=3", "train.keep_last=9") == 0
    return run


def test_it_learns_a_planted_class_and_its_head_predicts_people_it_never_saw(
    world: Path, tmp_path: Path
) -> None:
    assert run_task(world, tmp_path, "train.epochs=6") == 0
    scores = metrics(tmp_path, "val/balanced_accuracy")
    assert list(scores) == [EPOCH * n for n in range(1, 7)]
    first, last = (metrics(tmp_path, "train/loss")[step]["train/loss"] for step in (1, 6 * EPOCH))
    assert first == pytest.approx(math.log(2), abs=0.02), "a new head has no opinion"
    assert last < 0.4
    assert max(row["val/balanced_accuracy"] for row in scores.values()) > 0.9
    head = open_head(str(tmp_path))
    store = PreparedStore.open(head.cfg.data.store)
    cohort = read_folds(store)
    evaluated = cohort.fold == EVALUATED
    probabilities = predict_rows(head, store, cohort.rows[evaluated], RUNTIME)
    assert (probabilities.argmax(axis=1) == cohort.target[evaluated, 0]).mean() > 0.9
    assert head.state["validation"]["score"] == max(r["val/balanced_accuracy"] for r in scores.values())
    report.main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "Fine-tuning on 3D retinal OCT" in page
    assert "Score of the task" in page
    assert read_run(tmp_path).is_finetuning


def test_the_report_knows_the_metric_of_every_kind() -> None:
    assert {metric_name(metric) for metric in METRICS.values()} == set(TASK_SCORES)


def test_rates_of_layers_are_those_of_a_table_made_by_hand() -> None:
    cfg = small_config("vjepa2", "optim.weight_decay=0.3")
    model = TunedModel(build_encoder(cfg), 4, cfg)
    expected = {  # name: (share of the learning rate, weight decay)
        "encoder.patch_embed.proj.weight": (0.25, 0.3),
        "encoder.patch_embed.proj.bias": (0.25, 0.0),
        "encoder.blocks.0.attn.qkv.weight": (0.5, 0.3),
        "encoder.blocks.0.norm1.weight": (0.5, 0.0),
        "encoder.blocks.1.mlp.fc2.weight": (1.0, 0.3),
        "encoder.norm.weight": (1.0, 0.0),
        "top.head.last.weight": (1.0, 0.3),
        "top.head.last.bias": (1.0, 0.0),
    }
    of_weight = {
        id(p): (group["rate_share"], group["weight_decay"])
        for group in layer_groups(model.encoder, model.top, 0.3, 0.5)
        for p in group["params"]
    }
    weights = dict(model.named_parameters())
    assert {name: of_weight[id(weights[name])] for name in expected} == expected


@pytest.mark.parametrize("recipe", ["vjepa2", "methods"])
@pytest.mark.parametrize(("kind", "blocks"), [("linear", ()), ("mlp", (1,)), ("attentive", (1, 2))])
def test_every_parameter_has_a_gradient_and_one_group(
    recipe: str, kind: str, blocks: tuple[int, ...]
) -> None:
    """But the mask token of a dense encoder, which no volume meets, and blocks that no feature rests on."""
    cfg = small_config(recipe, f"head.kind={kind}")
    model = TunedModel(with_features(build_encoder(cfg), blocks), 3, cfg)
    valid = torch.ones(2, math.prod(cfg.grid))
    model(volumes(cfg, 2), valid, torch.arange(2)).square().sum().backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    idle = {name for name in dict(model.named_parameters()) if blocks == (1,) and ".blocks.1." in name}
    assert set(dict(model.named_parameters())) - set(trained) <= {"encoder.mask_token"} | idle
    assert not idle & set(trained)
    groups = layer_groups(model.encoder, model.top, 0.1, 0.5)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.grad is not None)
    no_decay = [group for group in groups if group["weight_decay"] == 0]
    tables = [p for name, p in model.named_parameters() if name.endswith(("pos_embed", "query"))]
    assert all(any(p is q for group in no_decay for q in group["params"]) for p in tables)


def test_a_volume_with_one_valid_token_has_a_finite_gradient() -> None:
    """Its features do not vary, and the root of 0 has no slope."""
    cfg = small_config()
    model = TunedModel(build_encoder(cfg), 3, cfg)
    valid = torch.zeros(1, math.prod(cfg.grid))
    valid[0, 5] = 1
    model(volumes(cfg, 1), valid).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_dropout_is_drawn_from_the_samples_seeds_and_only_in_training() -> None:
    cfg = small_config("vjepa2", "method.dropout=0.5")
    model = TunedModel(build_encoder(cfg), 3, cfg)
    batch, valid = volumes(cfg, 2), torch.ones(2, math.prod(cfg.grid))
    first, again, other = (model(batch, valid, torch.tensor(seeds)) for seeds in ([1, 2], [1, 2], [1, 3]))
    plain = model(batch, valid)
    assert torch.equal(first, again)
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(first, plain)
    assert torch.equal(plain, model(batch, valid)), "nothing of the masks stays"


def test_the_whole_encoder_moves(world: Path, finished: Path) -> None:
    pretrained = load_checkpoint(str(world / "pretrained/checkpoints/best_probe.pt"))["model"]
    own = {k.removeprefix("target_encoder."): v for k, v in pretrained.items() if k.startswith("target_enc")}
    first, second = (saved(finished, f"step_{step:08d}")["model"] for step in (3, 6))
    for name, value in own.items():
        assert not torch.equal(first[f"encoder.{name}"], value), name
    assert not torch.equal(first["top.head.last.weight"], second["top.head.last.weight"])


def test_the_last_update_has_the_least_rate(finished: Path) -> None:
    rates, optim = metrics(finished, "train/lr"), open_head(str(finished)).cfg.optim
    assert rates[3 * EPOCH]["train/lr"] == pytest.approx(optim.min_lr_ratio * optim.base_lr)


def test_volumes_to_evaluate_are_never_read(world: Path, finished: Path, rows_read: set[int]) -> None:
    cohort = read_folds(PreparedStore.open(str(world / "store")))
    assert rows_read == set(cohort.rows[cohort.fold != EVALUATED].tolist())


def test_a_run_stopped_three_times_equals_one_that_was_not(
    world: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """SIGTERM in the first epoch, in a validation, and after that."""
    real_update, real_predict = loop.update_model, loop.predict
    updates = 0

    def update(*arguments: Any, **named: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates in (2, 10):
            os.kill(os.getpid(), signal.SIGTERM)
        return real_update(*arguments, **named)

    def predict(*arguments: Any) -> Any:
        if updates == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_predict(*arguments)

    monkeypatch.setattr(loop, "update_model", update)
    monkeypatch.setattr(loop, "predict", predict)
    caplog.set_level("INFO")
    settings = (*NOISE, "train.ckpt_every_steps=3", "train.keep_last=9")
    for step in (2, 8, 10):
        assert run_task(world, tmp_path, *settings) == EXIT_STOPPED
        assert f"stopped by SIGTERM at step {step} of 12; run the same command again to go on" in caplog.text
        monkeypatch.setattr(loop, "predict", real_predict if step == 8 else predict)
    assert run_task(world, tmp_path, *settings) == 0
    assert_same(saved(tmp_path, "step_00000012"), saved(finished, "step_00000012"))
    assert metrics(tmp_path) == metrics(finished)
    assert saved(tmp_path, "step_00000012")["progress"] == saved(finished, "step_00000012")["progress"]
    head, expected = (saved(run, "head") for run in (tmp_path, finished))
    torch.testing.assert_close(head["encoder_weights"], expected["encoder_weights"], rtol=0, atol=0)


def test_accumulation_changes_no_gradient(world: Path, tmp_path: Path) -> None:
    """Four micro-batches of two volumes, and one of eight."""
    store = PreparedStore.open(str(world / "store"))
    results = []
    for size in (8, 2):
        source = open_task(world, tmp_path, *NOISE, f"train.per_core_batch_size={size}")
        tuning = open_tuning(source, store, read_folds(store), RUNTIME)
        _, batches = tuning.examples.batches(RUNTIME, 3, 4)
        parts = tuning.model, tuning.optimizer, next(batches), source.cfg, RUNTIME, 0.016
        result = loop.update_model(*parts)
        gradients = {name: p.grad for name, p in tuning.model.named_parameters()}
        results.append((result.loss, result.grad_norm, gradients))
        assert gradients["encoder.blocks.0.attn.qkv.weight"] is not None
        rates = {group["lr"] for group in tuning.optimizer.param_groups}
        assert sorted(rates) == pytest.approx([0.009, 0.012, 0.016])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_bf16_computes_in_half_and_keeps_whole_weights(world: Path, tmp_path: Path) -> None:
    """The shipped file trains so: linear layers in bfloat16; loss, weights and moments in float32."""
    source, store = open_task(world, tmp_path, *NOISE), PreparedStore.open(str(world / "store"))
    results = []
    for use_bf16 in (False, True):
        runtime, seen = Runtime(RUNTIME.device, use_bf16=use_bf16), set[torch.dtype]()
        tuning = open_tuning(source, store, read_folds(store), runtime)
        tuning.model.encoder.blocks[0].mlp.fc1.register_forward_hook(lambda *a, s=seen: s.add(a[-1].dtype))
        _, batches = tuning.examples.batches(runtime, 3, 4)
        parts = tuning.model, tuning.optimizer, next(batches), source.cfg, runtime, 1e-3
        result = loop.update_model(*parts)
        assert seen == {torch.bfloat16 if use_bf16 else torch.float32}
        moments = [m for state in tuning.optimizer.state.values() for m in state.values()]
        kept = [*tuning.model.parameters(), *moments, result.loss]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        results.append((float(result.loss), float(result.grad_norm)))
    assert results[1] == pytest.approx(results[0], rel=0.03)
    assert results[1] != results[0]


class Member(Group):
    """One of several processes that only share data."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_world_size_and_accumulation_change_no_volume(world: Path, tmp_path: Path) -> None:
    store = PreparedStore.open(str(world / "store"))

    def volumes_of_a_step(world_size: int, size: int) -> dict[int, list[float]]:
        """Draws and truth of each volume, by its own seed."""
        cfg = open_task(world, tmp_path, *NOISE, f"train.per_core_batch_size={size}").cfg
        examples = Examples(cfg, store, read_folds(store))
        drawn = {}
        for rank in range(world_size):
            runtime = Runtime(RUNTIME.device, use_bf16=False, group=Member(rank, world_size))
            for micro in next(examples.batches(runtime, 5, 6)[1]):
                for i, seed in enumerate(micro["sample_seed"].tolist()):
                    parts = [micro[k][i] for k in ("truth", "weight", "mean", "noise_seed")]
                    drawn[seed] = [float(v) for part in parts for v in part.flatten()]
        return drawn

    expected = volumes_of_a_step(1, 8)
    assert len(expected) == 8
    assert volumes_of_a_step(2, 2) == expected
    assert volumes_of_a_step(4, 1) == expected


def test_patience_ends_a_run_and_the_best_epoch_is_kept(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    planted = iter([(0.5, 1.0), (0.9, 0.5), (0.9, 0.6), (0.7, 0.1), (1.0, 0.0)])
    sure = Calibration(1.5, None, 30, 0.7, 0.6)
    monkeypatch.setattr(loop, "validate", lambda tuning: (*next(planted), sure))
    settings = ("train.epochs=9", "finetune.patience=2", "train.keep_last=9", "train.ckpt_every_steps=4")
    caplog.set_level("INFO")
    assert run_task(world, tmp_path, *settings) == 0
    assert list(metrics(tmp_path, "val/loss")) == [4, 8, 12, 16]
    assert "finished at step 16 of 36, early: no better validation since; best epoch 2" in caplog.text
    best, head = saved(tmp_path, "step_00000008")["model"], saved(tmp_path, "head")
    assert head["validation"] == {
        "metric": "balanced accuracy", "score": 0.9, "loss": 0.5, "epoch": 2, "step": 8
    }  # fmt: skip
    assert stored_calibration(head) == sure
    assert stored_familiarity(head) is None
    for name, value in head["encoder_weights"].items():
        assert torch.equal(value, best[f"encoder.{name}"])
    assert torch.equal(head["head"]["last.weight"], best["top.head.last.weight"])
    assert not torch.equal(
        saved(tmp_path, "step_00000016")["model"]["top.head.last.weight"], head["head"]["last.weight"]
    )
    assert run_task(world, tmp_path, *settings) == 0
    assert "nothing to do: the run ended at step 16 of 36" in caplog.text


def test_an_update_that_is_not_finite_moves_nothing_and_many_end_the_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    real = loop.update_model
    steps: list[int] = []

    def update(model: Any, optimizer: Any, batches: Any, *rest: Any, **named: Any) -> Any:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        steps.append(len(steps))
        is_bad = steps[-1] in (2, 6, 7)
        if is_bad:
            batches[0]["mean"][0] = math.nan
        result = real(model, optimizer, batches, *rest, **named)
        is_same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert is_same == is_bad
        return result

    monkeypatch.setattr(loop, "update_model", update)
    monkeypatch.setattr(skipped_updates, "MAX_BAD_STEPS", 2)
    with pytest.raises(
        UserError, match=r"in 2 updates in a row .* The last good checkpoint is .*step_0+4.pt"
    ):
        run_task(world, tmp_path, "train.ckpt_every_steps=4")
    rows = metrics(tmp_path, "train/loss")
    assert [rows[step]["train/bad_steps"] for step in (2, 3, 4, 7)] == [0, 1, 1, 2]
    assert "update skipped, loss or gradient not finite: step 2: rows [" in caplog.text


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """The encoder in training can do with so many volumes, and fails at its end; returns what is tried."""
    real, tried = TunedModel.forward, list[int]()

    def forward(model: TunedModel, view: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if model.training:
            tried.append(len(view))
        outputs = real(model, view, *rest)
        if model.training and len(view) > most:
            raise torch.OutOfMemoryError("planted")
        return outputs

    monkeypatch.setattr(TunedModel, "forward", forward)
    return tried


def test_out_of_memory_halves_the_batch_before_the_first_update_and_keeps_the_losses(
    world: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    tried = short_of_memory(monkeypatch, 2)
    assert run_task(world, tmp_path, *NOISE, "train.ckpt_every_steps=3", "train.keep_last=9") == 0
    words = [f"out of memory: per_core_batch_size {n} -> {n // 2}" for n in (8, 4)]
    assert [record.message for record in caplog.records if "out of memory" in record.message] == words
    assert tried[:4] == [8, 4, 2, 2]
    expected = metrics(finished, "train/loss")
    assert metrics(tmp_path, "train/loss").keys() == expected.keys()
    for step, row in metrics(tmp_path, "train/loss").items():
        assert row["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-4), step
    short_of_memory(monkeypatch, 0)
    with pytest.raises(UserError, match=r"out of memory: one volume of spatial\.image_size"):
        run_task(world, tmp_path / "none", *NOISE)


def test_the_trial_step_leaves_no_trace(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fits or not; and another process's shortage is this one's too."""
    source = open_task(world, tmp_path, *NOISE)
    store = PreparedStore.open(str(world / "store"))
    runtime = Runtime(RUNTIME.device, use_bf16=False)
    tuning = open_tuning(source, store, read_folds(store), runtime)
    before = {name: value.clone() for name, value in tuning.model.state_dict().items()}
    short_of_memory(monkeypatch, 4)
    votes: list[bool] = []

    def any_of_two(_: Group, flag: bool) -> bool:
        votes.append(flag)
        return flag or len(votes) == 2

    monkeypatch.setattr(Group, "any", any_of_two)
    assert settle_memory(tuning, 0).cfg.train.per_core_batch_size == 2
    assert votes == [True, False, False]
    for name, value in tuning.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {float(state["step"]) for state in tuning.optimizer.state.values()} == {0.0}
    assert all(weight.grad is None for weight in tuning.model.parameters())


def test_another_encoder_or_another_truth_is_not_gone_on_with(world: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=1", "train.val_every_steps=1")
    assert run_task(world, tmp_path, *settings) == 0
    other = save_checkpoint(config(world, tmp_path / "other"), lambda model: None, step=41)
    with pytest.raises(UserError, match=r"expected the checkpoint .* as the run began, found another"):
        run_task(world, tmp_path, *settings, f"model.checkpoint={other}")
    source = open_task(world, tmp_path, *settings)
    store = PreparedStore.open(source.cfg.data.store)
    cohort = read_folds(store)
    cohort.target[0] = 1 - cohort.target[0]
    with pytest.raises(UserError, match=r"expected the labelled volumes of .* as the run began"):
        finetune(source, store, cohort, RUNTIME)
    with pytest.raises(UserError, match=r"expected a run of 1 updates as the run began, found another"):
        run_task(world, tmp_path, "train.max_steps=2", "train.val_every_steps=1")
    with pytest.raises(UserError, match=r"train\.ckpt_dir: expected a folder for the best epoch, found null"):
        run_task(world, tmp_path, "train.ckpt_dir=null")


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_the_head_file_of_another_kind_predicts_in_the_labels_own_unit(
    world: Path, tmp_path: Path, kind: str
) -> None:
    settings = ("train.epochs=4",)
    if kind == "multilabel":
        settings += ("task.names=[a,b]",)
    assert run_task(world, tmp_path, *settings, kind=kind) == 0
    head = open_head(str(tmp_path))
    store = PreparedStore.open(head.cfg.data.store)
    cohort = read_folds(store, kind)
    chosen = cohort.fold == EVALUATED
    scores = predict_rows(head, store, cohort.rows[chosen], RUNTIME)
    spread = cohort.target.max() - cohort.target.min()
    assert np.abs(scores - cohort.target[chosen]).mean() < 0.4 * spread, "half of it is chance"


def test_the_shipped_file_reads_as_a_whole_configuration(world: Path) -> None:
    cfg: Config = open_source(CONFIG, [f"model.checkpoint={world / 'pretrained'}"]).cfg
    assert (cfg.finetune.encoder, cfg.method.drop_path) == ("trained", 0.1)
