"""The configuration: every mistake is one line that names the key, with exit code 2."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from benchmarks.evidence.arms import VJEPA2
from data_setup.prepare import main as prepare
from finetuning.compare import parse as compare_words
from tests.support.task_configs import below
from utils.cli import parse_cli
from utils.config.load import (
    GONE_KEYS,
    accumulation_steps,
    changed_config,
    changed_keys,
    config_of_yaml,
    flatten,
    load_config,
    require_changes,
    to_yaml,
)
from utils.config.recipes import RECIPES, Recipe
from utils.config.schema import MISMATCHED, Config, MaskFamily, MethodConfig, TrainConfig, keys_with, leaves
from utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "smoke_test.yaml"
BOUNDED = [name for name, part, _ in leaves(Config()) if part.metadata.get("bound")]


def edited(tmp_path: Path, line: str, new: str) -> Path:
    """The smoke test's file with the one line that matches replaced."""
    text, count = re.subn(rf"^{line}\n", new, SMOKE.read_text(), flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / "edited.yaml"
    path.write_text(text)
    return path


# a sweep is no configuration: tests/pretraining/test_schedules.py
SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.name.startswith("sweep_")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert load_config(path, base=below(path)).experiment_name == path.stem


ALL_TOKENS = [f"method.{key}=null" for key in ("context_ratio", "target_ratio", "mask_blocks")]
MAE = ["method.recipe=mae", "method.regulariser=none", "method.regulariser_weight=0"]


PRETRAINING = [path for path in SHIPPED if not below(path)]


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda p: p.stem)
def test_every_pretraining_configuration_can_be_switched_to_mae(path: Path) -> None:
    ratio = [] if RECIPES[load_config(path).method.recipe].masks else ["method.mask_ratio=0.75"]
    assert load_config(path, [*MAE, *ratio]).method.recipe == "mae"


def test_what_a_head_may_change_is_read_by_key() -> None:
    require_changes("predict", ["model={checkpoint: x}", "data.workers=1"])
    with pytest.raises(ConfigError, match="expected only changes of data"):
        require_changes("predict", ["model={checkpoint: x, size: s}"])


def test_methods_configurations_hold_the_methods_values() -> None:
    for name, epochs in (("single", 120), ("multi", 150)):
        c = load_config(ROOT / "configs" / f"pretrain_vjepa_{name}_domain.yaml")
        assert c.spatial.target_spacing == (0.05, 0.02, 0.02)
        assert (c.spatial.image_size, c.spatial.patch_size) == ((64, 384, 384), (4, 16, 16))
        assert (c.method.mask_ratio, c.method.ema_base) == (0.6, 0.996)
        train = c.train
        assert (train.global_batch_size, train.per_core_batch_size, train.epochs) == (32, "auto", epochs)
        assert (c.optim.base_lr, c.optim.weight_decay, c.optim.betas) == (1e-4, 0.05, (0.9, 0.95))
        assert (c.optim.warmup_ratio, c.optim.min_lr_ratio, c.optim.clip_grad_norm) == (0.03, 0.1, 0.01)
        assert (c.train.use_bf16, c.train.ckpt_every_epochs) == (True, 5)
        assert accumulation_steps(c.train, 16) == 2  # a v4-32 has 16 chips


def test_methods_has_no_loss_of_neighbours() -> None:
    key = "method.neighbour_weight=1"
    assert load_config(SMOKE, [*VJEPA2, *MAE, key]).method.neighbour_weight == 1
    methods = ROOT / "configs" / "pretrain_vjepa_multi_domain.yaml"
    with pytest.raises(ConfigError, match=r"neighbour_weight: expected 0 where .*, found 1\.0 with methods"):
        load_config(methods, [key])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.base_lrr=1", ["optim.base_lrr", "base_lr'"]),
        ("optims.base_lr=1", ["optims", "optim'"]),
        ("optim.base_lr=fast", ["optim.base_lr", "fast", "Float"]),
        ("train.epochs=1.5", ["train.epochs", "1.5", "Integer"]),
        ("model.size=xl", ["model.size", "one of ti, s, b, l, h", "xl"]),
        ("spatial.image_size=[16,96]", ["spatial.image_size", "expected 3 values", "[16, 96]"]),
        ("spatial.image_size=[16,96,60]", ["spatial.image_size", "[4, 8, 8]", "[16, 96, 60]"]),
        ("train.ckpt_dir=None", ["train.ckpt_dir=null"]),
        ("data.list_strategy=single_domain", ["data.device_filter", "exactly one device"]),
        ("method.context_ratio=0.8", ["method.context_ratio", "<= 1", "1.1"]),
        (
            "method.context_ratio=0.6",
            ["method.mask_blocks[1].scale", "at most 1 - context_ratio = 0.4", "0.5"],
        ),
        ("method.regulariser_weight=0", ["method.regulariser_weight", "above 0"]),
        ("method.recipe=methods", ["method.mask_ratio, method.ema_base: expected a value", "none"]),
        ("optim.warmup_ratio=0.9", ["optim.cooldown_ratio", "<= 1"]),
        ("train.max_steps=null", ["train.epochs", "epochs or max_steps"]),
        ("train.max_steps=0", ["train.max_steps", "1 or more"]),
        ("seed", ["section.key=value"]),
        ("method.mask_ratio=0.5", ["method.mask_ratio", "null with recipe vjepa2", "0.5"]),
        ("method.mask_blocks=[{scale: 0}]", ["method.mask_blocks[0].scale", "(0, 1]", "found 0.0"]),
        ("method.mask_blocks=[{scale: 1.1}]", ["method.mask_blocks[0].scale", "(0, 1]", "found 1.1"]),
        ("method.mask_blocks=[{scale: .nan}]", ["method.mask_blocks[0].scale", "found nan"]),
        ("method.predictor_width=0", ["method.predictor_width", "multiple of 32"]),
        ("method.predictor_width=-32", ["method.predictor_width", "multiple of 32"]),
        ("method.predictor_width=48", ["method.predictor_width", "multiple of 32"]),
        ("augment.strength=1.1", ["augment.strength", "[0, 1]"]),
        ("head.learning_rates=[]", ["head.learning_rates: expected one number above 0 or more"]),
        ("head.learning_rates=[0.1,-1]", ["head.learning_rates"]),
        ("head.weight_decays=[-1]", ["head.weight_decays: expected one number of 0 or more"]),
        ("head.learning_rates=[1e-3,0.001]", ["head.learning_rates: expected different numbers", "0.001"]),
        ("head.weight_decays=[0.1,0,0.10]", ["head.weight_decays: expected different numbers"]),
        ("spatial.target_spacing=[.inf,1,1]", ["spatial.target_spacing", "finite"]),
        ("spatial.target_spacing=[1,0,1]", ["spatial.target_spacing", "above 0"]),
        ("optim.base_lr=.inf", ["optim.base_lr", "finite"]),
        ("optim.base_lr=0", ["optim.base_lr", "above 0"]),
        ("optim.weight_decay=.nan", ["optim.weight_decay", "finite"]),
        ("optim.clip_grad_norm=.inf", ["optim.clip_grad_norm", "finite"]),
        ("optim.betas=[0.9,1]", ["optim.betas", "[0, 1)"]),
        ("data.device_filter=[None]", ["data.device_filter", "'None'", "null"]),
        ("train.ckpt_dir=", ["train.ckpt_dir=null"]),
        ("train.ckpt_dir=''", ["train.ckpt_dir", "found ''", "ckpt_dir=null"]),
        ("method.mask_blocks=[{scale: 1, aspect: [1, 2]}]", ["aspect: unknown key"]),
        ("method.mask_blocks=[0.5]", ["method.mask_blocks[0]", "a section of keys", "0.5"]),
        ("method.mask_blocks=0.5", ["method.mask_blocks", "a list", "0.5"]),
        ("spatial=[1]", ["spatial", "a section of keys", "[1]"]),
        ("optim.betas=[null,0.9]", ["optim.betas", "2 values", "None"]),
        ("data.store=${data.store}", ["data.store: ", "Recursive"]),
        ("data=${data}", ["data: ", "Recursive"]),
        ("run.dir=${train.ckpt_dir}", ["run.dir: ", "Recursive"]),
        ("data.device_filter=['${nowhere}']", ["data.device_filter[0]: ", "'nowhere' not found"]),
        ("wandb.mode=off", ["wandb.mode", "expected one of online, offline, disabled, found off"]),
        ("train.max_steps=0160", ["train.max_steps", "expected a decimal number, found 0160"]),
        ("train.max_steps=08", ["train.max_steps", "decimal", "found 08"]),
        ("train.max_steps='010'", ["train.max_steps", "decimal", "found 010"]),
        ("train.max_steps=2:40", ["train.max_steps", "decimal", "found 2:40"]),
        ("optim.base_lr=-1:30.5", ["optim.base_lr", "decimal", "found -1:30.5"]),
        ("seed=0x1F", ["seed", "decimal", "found 0x1F"]),
        ("train.use_bf16=maybe", ["train.use_bf16", "expected true, false or auto, found maybe"]),
        ("train.use_bf16=null", ["train.use_bf16", "expected true, false or auto, found None"]),
        ("train.use_bf16=010", ["train.use_bf16", "decimal", "found 010"]),
        ("spatial.image_size=[016,96,64]", ["spatial.image_size[0]", "decimal", "found 016"]),
        ("method.mask_blocks=[{scale: 0:1}]", ["method.mask_blocks[0].scale", "decimal", "found 0:1"]),
        ("seed=3 #4", ["seed=3 #4", "one value, found '#4'"]),
        ("data.device_filter=[a] #2", ["device_filter", "one value, found '#2'"]),
        ("seed=#4", ["seed=#4", "one value"]),
        ("seed=99999999999999999999", ["seed", "a whole number below 2**63"]),
        ("train.max_steps=-99999999999999999999", ["train.max_steps", "a whole number"]),
        (f"seed={'9' * 6000}", ["override 'seed=999", "Exceeds the limit"]),
        (f"seed={'[' * 3000}", ["override 'seed=[[", "recursion"]),
        ("experiment_name=../../x", ["experiment_name", "a name, which stays below runs/", "../../x"]),
        ("experiment_name=a/../../x", ["experiment_name", "a name, which stays below runs/"]),
        ("experiment_name=/x", ["experiment_name", "a name, which stays below runs/"]),
        ("experiment_name=..", ["experiment_name", "a name, which stays below runs/"]),
        ("experiment_name=~/x", ["experiment_name", "a name, which stays below runs/"]),
        ("data.cache_dir=${oc.env:PLANTED}", ["data.cache_dir: ", "found ${oc.env:PLANTED}", "command line"]),
        ("seed=${oc.env:PLANTED,1}", ["seed: ", "found ${oc.env:PLANTED,1}"]),
        ("spatial.image_size=['${oc.env:PLANTED}',1,1]", ["spatial.image_size[0]: ", "${oc.env:PLANTED}"]),
        ("data=${${oc.env:PLANTED}:x}", ["data: ", "found ${${oc.env:PLANTED}:x}"]),
        ("data.store=${${run.dir}:x}", ["data.store: ", "found ${${run.dir}:x}"]),
        ("run.dir=${nowhere}", ["run.dir: ", "nowhere"]),
        ("method.recipe=vjepa", ["method.recipe: expected one of ", "found vjepa (did you mean vjepa2"]),
        (
            ["method.recipe=surroundings", *ALL_TOKENS[:-1]],
            ["method.mask_blocks: expected null with recipe surroundings, which draws no masks"],
        ),
        (
            ["method.recipe=surroundings", *ALL_TOKENS, "method.mask_ratio=0.5"],
            ["method.mask_ratio: expected null with recipe surroundings, found 0.5"],
        ),
        (
            ["method.recipe=surroundings", *ALL_TOKENS, "method.neighbour_weight=1"],
            ["method.neighbour_weight: expected 0 where the encoder computes all tokens"],
        ),
        ([*MAE, "method.mask_ratio=0.6"], ["method.mask_blocks: expected null with recipe mae and"]),
        ([*MAE, *ALL_TOKENS], ["mask_blocks: expected a value, or method.mask_ratio, with recipe mae"]),
        ([*MAE, "method.mask_blocks=[]"], ["method.mask_blocks: expected at least one family"]),
        (
            ["method.control=penalty_only", "method.regulariser=none", "method.regulariser_weight=0"],
            ["method.regulariser: expected vicreg with ", "penalty_only"],
        ),
        *(
            ([f"method.control={control}", "train.per_core_batch_size=1"],
             ["train.per_core_batch_size: expected 2 or more with ", f"={control}"])
            for control in MISMATCHED
        ),
        *(
            (["method.control=mismatched_latents", change],
             ["method.control: ", " where not both latents and voxels are predicted, found mis"])
            for change in ("method.neighbour_weight=0", "method.recipe=mae")
        ),
    ],
)  # fmt: skip
def test_a_mistake_names_the_key(
    override: str | list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "S3CRET")
    with pytest.raises(ConfigError) as error:
        load_config(SMOKE, [*VJEPA2, *([override] if isinstance(override, str) else override)])
    message = str(error.value)
    assert "\n" not in message
    assert "S3CRET" not in message
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize("text", ["${oc.env:PLANTED}", "${run.dir}", "a ${oc.decode:1}"])
def test_nothing_is_looked_up_for_a_configuration_out_of_a_checkpoint(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a stranger's, and what it resolves to would be copied on."""
    monkeypatch.setenv("PLANTED", "S3CRET")
    written = to_yaml(load_config(SMOKE, ["data.cache_dir=nobody"]))
    assert config_of_yaml(written, "a.pt").data.cache_dir == "nobody"
    with pytest.raises(ConfigError) as error:
        config_of_yaml(written.replace("cache_dir: nobody", f"cache_dir: {text}"), "a.pt")
    assert str(error.value) == f"a.pt: data.cache_dir: expected a plain value, found the reference {text}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n- b\n", "top level: expected a section of keys"),
        (b"seed: \xff\n", "UTF-8 text, found 0xff"),
        (b"5\n", "top level: expected a section of keys, found '5"),
        (b"9" * 6000, "top level: expected a section of keys, found '999"),
        (b"abc\n", "top level: expected a section of keys, found 'abc"),
        (b"seed: " + b"9" * 6000, "Exceeds the limit"),
        (b"seed: " + b"[" * 3000, "recursion"),
        (b"seed: 1\nseed: 2\n", r"seed.*line 2"),
        (b"train:\n  max_steps: 0160\n", r"train\.max_steps: expected a decimal number, found 0160"),
        (b"train: {max_steps: 2:40}\n", r"train\.max_steps: expected a decimal number, found 2:40"),
        (b"x: &x {max_steps: 010}\ntrain:\n  <<: *x\n", r"max_steps: expected a decimal number, found 010"),
        (b"seed: !!python/name:os.system\n", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "new", "words", "expected"),
    [
        ("  base_lr: .*", "", [], r"optim\.base_lr: expected a value, found none"),
        # named, rather than the key that refers to it
        ("  gcs_root: .*", "", ["data.store=${data.gcs_root}/store"], r"data\.gcs_root: expected a value"),
        ("train:", "train:\n  ckpt_dir: None\n", [], r"train\.ckpt_dir: .*'None'; write null"),
    ],
)
def test_a_key_without_a_value_is_named(
    line: str, new: str, words: list[str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(edited(tmp_path, line, new), words)


def test_1e4_is_a_float_in_file_and_override(tmp_path: Path) -> None:
    assert load_config(edited(tmp_path, "  base_lr: .*", "  base_lr: 1e-4\n")).optim.base_lr == 1e-4
    assert load_config(SMOKE, ["optim.base_lr=3e-4"]).optim.base_lr == 3e-4


TEXTS = (
    *("x #2", "007", "1e3", "1E234", "1_000", "on", "12:30:00", "2026-01-02", "0x1F", "True", "nan", "NULL"),
    *("a: b", "@x", "%x", "- a", "!x", "&x", "*x", "[a", "{a", "|", "`x", "?", "=", "'x'"),
    *(" x ", "a\tb", "é"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_an_override_of_a_text_is_that_text(text: str, tmp_path: Path) -> None:
    keys = "experiment_name", "data.store", "data.cache_dir", "task.label_column", "model.checkpoint"
    cfg = load_config(SMOKE, [f"{key}={text}" for key in keys])
    values = dict(flatten(cfg))
    assert {values[key] for key in keys} == {text}
    assert cfg.run.dir == f"runs/{text}"
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(cfg))
    assert load_config(path) == config_of_yaml(to_yaml(cfg), "a.pt") == changed_config(cfg, [], "") == cfg


@pytest.mark.parametrize(
    "text", ["007", "1e3", "1E234", "1_000", "on", "12:30:00", "2026-01-02", "0x1F", "no"]
)
def test_a_text_of_a_file_or_a_list_is_that_text(text: str, tmp_path: Path) -> None:
    path = edited(tmp_path, "experiment_name: .*", f"experiment_name: {text}\n")
    cfg = load_config(path, [f"data.device_filter=[{text}, ' a #b']"])
    assert (cfg.experiment_name, cfg.data.device_filter) == (text, [text, " a #b"])
    path.write_text(path.read_text().replace("data:\n", f"data:\n  protocol_filter: [{text}]\n"))
    assert load_config(path).data.protocol_filter == [text]


@pytest.mark.parametrize("home", ["~/x", "~root/x"])
def test_the_home_folder_has_one_meaning(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    there = os.path.expanduser(home)
    assert load_config(SMOKE, [f"run.dir={home}"]).train.ckpt_dir == f"{there}/checkpoints"
    path = edited(tmp_path, "  store: .*", f"  store: {home}\n  cache_dir: ~\n")
    cfg, _ = parse_cli("test", "", ["--config", str(path), f"--checkpoint={home}"])
    assert (cfg.data.store, cfg.data.cache_dir, cfg.model.checkpoint) == (there, None, there)


def test_interpolation_follows_overrides() -> None:
    c = load_config(SMOKE, ["experiment_name=other", "data.gcs_root=gs://b/d"])
    assert c.run.dir == "runs/other"
    assert c.train.ckpt_dir == "runs/other/checkpoints"
    assert c.data.manifest_path == "gs://b/d/retinal_oct/manifest.tsv"
    assert load_config(SMOKE, ["data.store=${run.dir}/store"]).data.store == "runs/smoke_test/store"


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load_config(SMOKE).seed = 1


def test_checkpoint_flag_is_sugar_for_the_key() -> None:
    cfg, _ = parse_cli("test", "", ["--config", str(SMOKE), "--checkpoint", "a.pt", "seed=3"])
    assert (cfg.model.checkpoint, cfg.seed) == ("a.pt", 3)


@pytest.mark.parametrize(
    ("parse", "words"),
    [(prepare, []), (compare_words, ["--checkpoints", "b.pt"])],
    ids=["prepare", "compare"],
)
def test_a_command_that_reads_no_checkpoint_refuses_the_flag(
    parse: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--config", str(SMOKE), *words, "--checkpoint", "a.pt"])
    assert end.value.code == 2
    assert "unrecognized arguments: --checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("per_core", "world", "steps"), [(4, 2, 2), (2, 4, 2), (8, 2, 1)])
def test_accumulation_is_derived(per_core: int, world: int, steps: int) -> None:
    assert accumulation_steps(train_of(per_core), world) == steps


@pytest.mark.parametrize(
    ("per_core", "world", "hint"),
    [(16, 2, "; train.per_core_batch_size=8 fits"), (16, 3, ""), (4, 3, ""), (4, 5, "")],
)
def test_contradicting_batch_sizes_state_all_four_numbers(per_core: int, world: int, hint: str) -> None:
    expected = f"global 16 != per core {per_core} x world {world} x accumulation 1{hint}$"
    with pytest.raises(ConfigError, match=expected):
        accumulation_steps(train_of(per_core), world)


def train_of(per_core: int) -> TrainConfig:
    return load_config(SMOKE, ["train.global_batch_size=16", f"train.per_core_batch_size={per_core}"]).train


def test_a_key_with_another_name_keeps_its_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a file of a person, and in what an older run or head stored."""
    content = yaml.safe_load(SMOKE.read_text())
    content["data"]["flow_manifest_path"] = "${data.gcs_root}/octa.tsv"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    assert load_config(path).data.octa_manifest_path.endswith("/octa.tsv")
    content["data"]["heights_manifest_path"] = "maps.tsv"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"flow_manifest_path: expected null or maps\.tsv, the key is gone"):
        load_config(path)
    stored = yaml.safe_load(to_yaml(load_config(SMOKE)))
    stored["data"] |= {"heights_manifest_path": "maps.tsv", "flow_manifest_path": "octa.tsv"}
    stored["task"] |= {"kind": "segmentation", "surfaces": None, "classes": ["drusen"], "slabs": None}
    del stored["data"]["octa_manifest_path"], stored["task"]["names"]
    cfg = config_of_yaml(yaml.safe_dump(stored), "head.pt")
    assert (cfg.data.octa_manifest_path, cfg.task.names) == ("maps.tsv", ["drusen"])
    assert "head.pt: the key data.flow_manifest_path=octa.tsv is gone and is left out" in caplog.text


def test_only_operational_keys_may_change_on_resume() -> None:
    old = load_config(SMOKE)
    allowed = ["train.max_steps=9", "train.log_every_steps=1", "wandb.mode=disabled", "data.workers=0"]
    allowed += ["train.per_core_batch_size=8"]
    allowed += ["wandb.project=lab/eyes", "model.checkpoint=a.pt"]
    allowed += ["data.cache_dir=/tmp/cache", "train.ckpt_every_steps=7", "train.keep_last=9"]
    allowed += ["val.max_volumes=9"]
    assert changed_keys(old, load_config(SMOKE, allowed)) == []
    for key, value in (("task.label_column", "age"), ("task.id_column", "id")):
        assert [k for k, _, _ in changed_keys(old, load_config(SMOKE, [f"{key}={value}"]))] == [key]
    assert changed_keys(old, load_config(SMOKE, ["optim.base_lr=1", "seed=2"])) == [
        ("seed", 0, 2),
        ("optim.base_lr", 2e-3, 1.0),
    ]


def test_help_of_training_imports_nothing_heavy() -> None:
    """torch and MONAI take seconds to import; --help and a wrong key need neither."""
    command = [sys.executable, "-X", "importtime", "-m", "pretraining.train", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "utils.cli" in imported
    assert imported & {"torch", "monai", "zarr", "pandas", "matplotlib"} == set()


def sections(cls: type, prefix: str = "") -> dict[str, tuple[str, type]]:
    """Name of the section -> (its dotted path, its class); the families of mask_blocks count as one."""
    result = {"MaskFamily": ("method.mask_blocks", MaskFamily)} if not prefix else {}
    for f in fields(cls):
        default = f.default_factory() if callable(f.default_factory) else None
        if is_dataclass(default):
            result[f.name] = (f"{prefix}{f.name}", type(default))
            result |= sections(type(default), f"{prefix}{f.name}.")
    return result


SECTIONS = sections(Config)


def keys_read(source: str) -> set[str]:
    """Dotted keys that a module reads.

    `<anything>.section.key`; `name.key` where the module has `name = <anything>.section` or a parameter
    `name: SectionConfig`; `getattr` of either in a function, with every key that the function spells as text.
    """
    tree = ast.parse(source)
    names = {"cfg": "", "config": ""}  # variable -> section; the whole configuration is ""
    by_class = {cls.__name__: name for name, (_path, cls) in SECTIONS.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            for part in ast.walk(node.annotation):
                if isinstance(part, ast.Name) and part.id in by_class:
                    names[node.arg] = by_class[part.id]
        elif isinstance(node, ast.Assign):
            to, of = node.targets[0], node.value
            both = isinstance(to, ast.Tuple) and isinstance(of, ast.Tuple) and len(to.elts) == len(of.elts)
            for target, value in zip(to.elts, of.elts, strict=True) if both else [(to, of)]:
                if (
                    isinstance(target, ast.Name)
                    and isinstance(value, ast.Attribute)
                    and value.attr in SECTIONS
                ):
                    names[target.id] = value.attr

    def section_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            return node.attr if node.attr in SECTIONS else None
        return names.get(node.id) if isinstance(node, ast.Name) else None

    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add((section_of(node.value), node.attr))
        if isinstance(node, ast.FunctionDef):
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
            loops = {section_of(n.args[0]) for n in calls if n.func.id == "getattr"}
            read |= {(section, text) for section in loops for text in texts}
    return {
        f"{SECTIONS[section][0]}.{key}" if section else key for section, key in read if section is not None
    }


def test_every_number_has_bounds() -> None:
    by_rule = {"spatial.image_size", "spatial.patch_size"}
    by_rule |= {"method.mask_blocks.scale", "head.learning_rates", "head.weight_decays"}
    numbers = {"seed"}
    for path, cls in SECTIONS.values():
        for name, hint in get_type_hints(cls).items():
            if {hint, *get_args(hint)} & {int, float}:
                numbers.add(f"{path}.{name}")
    assert numbers - by_rule == set(BOUNDED)


@pytest.mark.parametrize("key", BOUNDED)
def test_a_number_out_of_bounds_names_its_key(key: str) -> None:
    value = {"spatial.target_spacing": "[1,1,-1]", "optim.betas": "[0.9,-1]"}.get(key, "-1")
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: expected .*, found .*-1"):
        load_config(SMOKE, [f"{key}={value}"])


def test_every_field_is_read_outside_the_schema() -> None:
    """A key that nothing reads is a lie; checking a value is not reading it."""
    read: set[str] = set()
    for folder in ("data_setup", "models", "pretraining", "finetuning", "utils"):
        for path in (ROOT / folder).glob("**/*.py"):
            if path.parent.name != "config" or path.name == "recipes.py":
                read |= keys_read(path.read_text())
    config = (ROOT / "utils" / "config" / "load.py").read_text()
    read |= keys_read(config[config.index("def accumulation_steps") : config.index("def to_yaml")])
    leaves = {f.name for f in fields(Config)} - set(SECTIONS)
    leaves |= {f"{path}.{f.name}" for path, cls in SECTIONS.values() for f in fields(cls)} - {
        path for path, _cls in SECTIONS.values() if path != "method.mask_blocks"
    }
    only_checked = {"data.list_strategy"}
    assert leaves - read == only_checked
    assert len(leaves) > 70


def test_a_key_of_another_section_or_object_is_no_read() -> None:
    """What the search above must tell apart."""
    assert keys_read("def f(cfg):\n    optim = cfg.optim\n    return optim.betas") >= {"optim", "optim.betas"}
    assert "augment.strength" in keys_read("def f(a: AugmentConfig):\n    return a.strength")
    assert "data.workers" in keys_read("def f(self):\n    return self.data.workers")
    assert "data.max_samples" in keys_read(
        "def f(cfg):\n    return [getattr(cfg.data, k) for k in ('max_samples',)]"
    )
    others = "model.compile(); cfg.wandb.workers; zarr.workers; names = ('workers',); cfg.data.workers = 1"
    assert not keys_read(others) & {"train.workers", "data.workers"}


def test_the_table_has_a_value_for_every_field() -> None:
    for name, recipe in RECIPES.items():
        for part in fields(Recipe):
            choices = get_args(get_type_hints(Recipe)[part.name])
            if get_origin(get_type_hints(Recipe)[part.name]) is Literal:
                assert getattr(recipe, part.name) in choices, f"{name}.{part.name}"


def test_marks_stand_beside_the_keys() -> None:
    """A change here is a change of what old runs and checkpoints may be continued with."""
    assert keys_with("identity") == [
        *("spatial.target_spacing", "spatial.image_size", "spatial.patch_size", "spatial.resample"),
        *("model.size", "model.rope", "method.recipe"),
    ]
    assert keys_with("is_place") == ["train.ckpt_dir", "run.dir"]
    assert "data.store" in keys_with("per_machine")
    assert len(keys_with("may_change")) == 24
    assert {"train.max_steps", "data.workers", "wandb.mode"} <= set(keys_with("may_change"))
    assert not {"seed", "optim.base_lr", "train.global_batch_size"} & set(keys_with("may_change"))


def test_a_checkpoint_of_an_unknown_recipe_is_one_line() -> None:
    text = to_yaml(load_config(SMOKE)).replace("recipe: surroundings", "recipe: of_tomorrow")
    with pytest.raises(ConfigError, match=r"a\.pt: method\.recipe: expected one of .*, found of_tomorrow"):
        config_of_yaml(text, "a.pt")


def older(place: int, changes: dict[str, Any]) -> str:
    """The smoke test as a version with all keys that went stored it."""
    content = yaml.safe_load(to_yaml(load_config(SMOKE, VJEPA2)))
    values = {key: values[place] for key, values in GONE_KEYS.items()}
    for key, value in (values | changes).items():
        section, name = key.rsplit(".", 1)
        part = content
        for step in section.split("."):
            part = part.setdefault(step, {})
        for one in part if isinstance(part, list) else [part]:
            one[name] = value
    return yaml.safe_dump(content)


@pytest.mark.parametrize("place", [0, -1])
def test_keys_that_went_are_taken_out_of_stored_configurations(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg, path = load_config(SMOKE, VJEPA2), tmp_path / "config.yaml"
    path.write_text(older(place, {}))
    assert load_config(path) == config_of_yaml(path.read_text(), "a.pt") == cfg
    assert not caplog.records
    path.write_text(older(place, {"finetune.lora_rank": 8}))
    assert config_of_yaml(path.read_text(), "a.pt") == cfg
    assert "a.pt: the key finetune.lora_rank=8 is gone and is left out" in caplog.text
    with pytest.raises(ConfigError, match=r"finetune\.lora_rank: expected null, the key is gone, found 8"):
        config_of_yaml(path.read_text(), "a.pt", to_go_on=True)
    with pytest.raises(ConfigError, match=r"finetune\.lora_rank: expected null, the key is gone, found 8"):
        load_config(path)
    goes_on = {"wandb.group": "first", "train.shard_parameters": True, "probe.max_volumes": 12}
    path.write_text(older(place, goes_on))
    assert config_of_yaml(path.read_text(), "a.pt", to_go_on=True) == cfg
    path.write_text(older(place, {"data.region_filter": ["Macula"], "method.mask_blocks.aspect": [1.0, 2.0]}))
    assert config_of_yaml(path.read_text(), "a.pt") == cfg
    for now, key in (
        (r" \(now data\.protocol_filter\)", "data.region_filter"),
        ("", "method.mask_blocks.aspect"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}: expected .*, the key is gone{now}, found \["):
            config_of_yaml(older(place, {key: [1.0]}), "a.pt", to_go_on=True)
    with pytest.raises(ConfigError, match=r"optim\.extend: unknown key"):
        load_config(SMOKE, ["optim.extend=null"])


def test_a_stored_penalty_that_went_is_read_as_the_one_that_stayed(caplog: pytest.LogCaptureFixture) -> None:
    """Not by a run that goes on, nor where a stranger's text names it by a reference."""
    cfg = load_config(SMOKE, [*VJEPA2, "method.control=penalty_only"])
    text = to_yaml(cfg).replace("regulariser: vicreg", "regulariser: sigreg")
    assert config_of_yaml(text, "a.pt") == cfg
    assert caplog.messages == ["a.pt: the penalty method.regulariser=sigreg is gone; it is read as vicreg"]
    with pytest.raises(
        ConfigError, match=r"^a\.pt: method\.regulariser: expected vicreg or none, sigreg is gone"
    ):
        config_of_yaml(text, "a.pt", to_go_on=True)
    with pytest.raises(ConfigError, match="expected a plain value, found the reference"):
        config_of_yaml(text.replace("sigreg", "${oc.env:HOME}"), "a.pt")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("method.mae_target", "plain", "expected null or normalised, the key is gone, found plain"),
        ("method.loss", "l2", "expected null, the key is gone, found l2"),
        ("method.target_layers", [3, 12], r"expected null, the key is gone, found \[3, 12\]"),
        ("method.neighbour_places", "own", "expected all, the key is gone, found own"),
        ("optim.use_scheduler", False, "expected true, the key is gone, found False"),
        ("task.time_column", "onset_days", "expected null, the key is gone"),
    ],
)
def test_a_stored_key_that_went_and_changed_the_run_is_named(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.pt: {re.escape(key)}: {expected}"):
        config_of_yaml(older(0, {key: value}), "a.pt")


@pytest.mark.parametrize(
    ("override", "today"),
    [
        ("task.surfaces=[ILM]", "now task.names"),
        ("data.heights_manifest_path=maps.tsv", "now data.octa_manifest_path"),
        ("finetune.mixup=0.1", "the key is gone"),
        ("wandb.log_images=true", "now wandb.send"),
        ("probe={max_volumes: 12}", "now val.max_volumes"),
        ("data.stored=here", "Did you mean"),
    ],
)
def test_a_command_line_with_a_key_that_went_hears_what_to_write_today(override: str, today: str) -> None:
    key = re.escape(override.partition("=")[0])
    with pytest.raises(ConfigError, match=f"{key}: unknown key.*{today}"):
        load_config(SMOKE, [override])


METHOD_KEYS_OF_A_COMMAND = {"control"}  # no way to train


def test_every_key_of_the_method_is_set_by_a_shipped_file() -> None:
    """What no file sets is an experiment, and those lie outside the core."""
    contents = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]
    written = {
        key for content in contents if isinstance(content.get("method"), dict) for key in content["method"]
    }
    assert {part.name for part in fields(MethodConfig)} - written == METHOD_KEYS_OF_A_COMMAND
