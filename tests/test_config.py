"""The configuration: every mistake is one line that names the key, with exit code 2."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from utils.config import (
    Config,
    ConfigError,
    accumulation_steps,
    changed_keys,
    flatten,
    load_config,
    parse_cli,
    to_yaml,
)

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / "configs" / "smoke_test.yaml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = SMOKE.read_text()
    assert old in text
    path = tmp_path / "edited.yaml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert load_config(path).experiment_name == path.stem


def test_methods_configurations_hold_the_methods_values() -> None:
    for name, epochs in (("single", 120), ("multi", 150)):
        c = load_config(ROOT / "configs" / f"pretrain_vjepa_{name}_domain.yaml")
        assert c.spatial.target_spacing == (0.05, 0.02, 0.02)
        assert (c.spatial.image_size, c.spatial.patch_size) == ((64, 384, 384), (4, 16, 16))
        assert (c.method.mask_ratio, c.method.ema_base) == (0.6, 0.996)
        assert (c.train.global_batch_size, c.train.per_core_batch_size, c.train.epochs) == (32, 1, epochs)
        assert (c.optim.base_lr, c.optim.weight_decay, c.optim.betas) == (1e-4, 0.05, (0.9, 0.95))
        assert (c.optim.warmup_ratio, c.optim.min_lr_ratio, c.optim.clip_grad_norm) == (0.03, 0.1, 0.01)
        assert (c.train.use_bf16, c.train.ckpt_every_epochs, c.train.val_fraction) == (True, 5, 0.1)
        assert accumulation_steps(c.train, 16) == 2  # a v4-32 has 16 chips


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.base_lrr=1", ["optim.base_lrr", "base_lr'"]),
        ("optims.base_lr=1", ["optims", "optim'"]),
        ("optim.base_lr=fast", ["optim.base_lr", "fast", "Float"]),
        ("train.epochs=1.5", ["train.epochs", "1.5", "Integer"]),
        ("model.size=xl", ["model.size", "xl", "'ti'"]),
        ("spatial.image_size=[16,96]", ["spatial.image_size", "expected 3 values", "[16, 96]"]),
        ("spatial.image_size=[16,96,60]", ["spatial.image_size", "[4, 8, 8]", "[16, 96, 60]"]),
        ("train.ckpt_dir=None", ["train.ckpt_dir=null"]),
        ("data.drop_last=false", ["data.drop_last", "true"]),
        ("data.list_strategy=single_domain", ["data.device_filter", "exactly one device"]),
        ("method.context_ratio=0.8", ["method.context_ratio", "<= 1", "1.1"]),
        ("method.regulariser_weight=0", ["method.regulariser_weight", "above 0"]),
        ("method.recipe=methods", ["method.mask_ratio", "None"]),
        ("optim.warmup_ratio=0.9", ["optim.cooldown_ratio", "<= 1"]),
        ("train.max_steps=null", ["train.epochs", "epochs or max_steps"]),
        ("train.max_steps=0", ["train.max_steps", "1 or more"]),
        ("seed", ["section.key=value"]),
    ],
)
def test_a_mistake_names_the_key(override: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(SMOKE, [override])
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message, message


def test_a_missing_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.base_lr: expected a value, found none"):
        load_config(edited(tmp_path, "  base_lr: 5.0e-4\n", ""))


def test_the_text_none_in_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.ckpt_dir: .*'None'; write null"):
        load_config(edited(tmp_path, "  use_bf16: false\n", "  use_bf16: false\n  ckpt_dir: None\n"))


def test_null_switches_checkpoints_off(tmp_path: Path) -> None:
    assert load_config(SMOKE, ["train.ckpt_dir=null"]).train.ckpt_dir is None


def test_1e4_is_a_float_in_file_and_override(tmp_path: Path) -> None:
    assert load_config(edited(tmp_path, "5.0e-4", "1e-4")).optim.base_lr == 1e-4
    assert load_config(SMOKE, ["optim.base_lr=3e-4"]).optim.base_lr == 3e-4


def test_interpolation_follows_overrides() -> None:
    c = load_config(SMOKE, ["experiment_name=other", "data.gcs_root=gs://b/d"])
    assert c.run.dir == "runs/other"
    assert c.train.ckpt_dir == "runs/other/checkpoints"
    assert c.data.manifest_path == "gs://b/d/retinal_oct/manifest.tsv"
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(SMOKE, ["run.dir=${nowhere}"])


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load_config(SMOKE).seed = 1  # type: ignore[misc]


def test_checkpoint_flag_is_sugar_for_the_key() -> None:
    cfg, _ = parse_cli("test", ["--config", str(SMOKE), "--checkpoint", "a.pt", "seed=3"])
    assert (cfg.model.checkpoint, cfg.seed) == ("a.pt", 3)


@pytest.mark.parametrize("world", [3, 5])
def test_contradicting_batch_sizes_state_all_four_numbers(world: int) -> None:
    cfg = load_config(SMOKE, ["train.per_core_batch_size=4", "train.grad_accum_steps=2"])
    with pytest.raises(ConfigError, match=rf"global 16 != per core 4 x world {world} x accumulation 2"):
        accumulation_steps(cfg.train, world)
    assert accumulation_steps(cfg.train, 2) == 2


def test_accumulation_is_derived() -> None:
    assert accumulation_steps(load_config(SMOKE, ["train.per_core_batch_size=2"]).train, 4) == 2
    with pytest.raises(ConfigError, match="global 16 != per core 16 x world 2 x accumulation 1"):
        accumulation_steps(load_config(SMOKE).train, 2)


def test_yaml_round_trip(tmp_path: Path) -> None:
    cfg = load_config(SMOKE, ["data.device_filter=[topcon_triton]"])
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(cfg))
    assert load_config(path) == cfg


def test_only_operational_keys_may_change_on_resume() -> None:
    old = load_config(SMOKE)
    allowed = ["train.max_steps=9", "train.log_every_steps=1", "wandb.mode=disabled", "data.workers=0"]
    allowed += ["train.per_core_batch_size=8", "train.grad_accum_steps=2"]
    assert changed_keys(old, load_config(SMOKE, allowed)) == []
    assert changed_keys(old, load_config(SMOKE, ["optim.base_lr=1", "seed=2"])) == [
        ("seed", 0, 2),
        ("optim.base_lr", 5e-4, 1.0),
    ]


def test_a_cli_ends_with_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "pretraining.train", "--config", str(SMOKE), "optim.base_lrr=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "optim.base_lrr" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_field_is_read_outside_the_schema() -> None:
    """A key that nothing reads is a lie. Reads are attribute accesses or names in getattr-like loops."""
    read: set[str] = set()
    for folder in ("data_setup", "models", "pretraining", "finetuning", "utils"):
        for path in (ROOT / folder).glob("*.py"):
            if path.name in ("config.py", "schema.py"):
                continue
            nodes = list(ast.walk(ast.parse(path.read_text())))
            read |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
            if any(isinstance(n, ast.Name) and n.id == "getattr" for n in nodes):
                read |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}

    def leaves(cls: type) -> set[str]:
        names = set()
        for f in fields(cls):
            default = f.default_factory() if callable(f.default_factory) else None
            names |= leaves(type(default)) if is_dataclass(default) else {f.name}
        return names

    # these are read by functions of config.py that others call: accumulation_steps and check_rules
    inside = {"grad_accum_steps", "drop_last", "list_strategy"}
    assert leaves(Config) - read - inside == set()
    assert len(dict(flatten(load_config(SMOKE)))) > 60
