"""The rules of a configuration that a type cannot say: bounds of single keys, and rules that join keys.

In: a `Config` of the right types. Out: nothing, or a `ConfigError` that names the keys that are wrong.
"""

from __future__ import annotations

import difflib
import math

from utils.config.recipes import RECIPES, Recipe, recipe_of
from utils.config.schema import DENSE_KINDS, MISMATCHED, Config, MethodConfig, TaskConfig, leaves
from utils.errors import ConfigError

BLOCK_KEYS = ("context_ratio", "target_ratio", "mask_blocks")
LEAST_NAMES = {"ordinal": 2, "multilabel": 1, "layers": 2, "segmentation": 1, "translation": 1}


def check_rules(cfg: Config, where: str) -> None:
    """Raise ConfigError for the first value out of bounds, or the first broken rule that joins keys."""
    check_recipe(cfg.method, where)
    try:
        _check_bounds(cfg)
        _check_sections(cfg)
        _check_names(cfg.task)
        _check_method(cfg.method)
        _check_masks(cfg.method, recipe_of(cfg.method))
        _check_head(cfg)
        _check_decoders(cfg)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _require(condition: bool, key: str, expected: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{key}: expected {expected}, found {value}")


def _check_bounds(cfg: Config) -> None:
    for key, part, value in leaves(cfg):
        numbers = value if isinstance(value, tuple) else (value,)
        short = all(abs(number) < 2**63 for number in numbers if isinstance(number, int))
        _require(short, key, "a whole number below 2**63", value)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        _require(finite, key, "finite numbers", value)
        bound = part.metadata.get("bound")
        if bound is not None:
            inside = all(bound.holds(number) for number in numbers if isinstance(number, int | float))
            _require(inside, key, bound.text, value)


def _check_sections(cfg: Config) -> None:
    """The rules of every section but `method`."""
    parts = cfg.experiment_name.split("/")
    is_below = not {"", ".", ".."} & set(parts)
    _require(is_below, "experiment_name", "a name, which stays below runs/", cfg.experiment_name)
    spatial, optim = cfg.spatial, cfg.optim
    for image, patch in zip(spatial.image_size, spatial.patch_size, strict=True):
        _require(
            patch > 0 and image > 0 and image % patch == 0,
            "spatial.image_size",
            f"positive multiples of spatial.patch_size {list(spatial.patch_size)}",
            list(spatial.image_size),
        )
    is_local = "://" not in cfg.run.dir
    _require(is_local, "run.dir", "a local folder (checkpoints may be in a bucket)", cfg.run.dir)
    devices = cfg.data.device_filter
    _require(
        cfg.data.list_strategy == "multi_domain" or len(devices or []) == 1,
        "data.device_filter",
        "exactly one device with data.list_strategy single_domain",
        devices,
    )
    _require(
        cfg.method.control not in MISMATCHED or cfg.train.per_core_batch_size != 1,
        "train.per_core_batch_size",
        f"2 or more with method.control={cfg.method.control} (targets are those of another volume)",
        cfg.train.per_core_batch_size,
    )
    share = optim.warmup_ratio + optim.cooldown_ratio
    _require(share <= 1, "optim.cooldown_ratio", "warmup_ratio + cooldown_ratio <= 1", share)
    has_end = cfg.train.epochs is not None or cfg.train.max_steps is not None
    _require(has_end, "train.epochs", "epochs or max_steps", None)


def _check_names(task: TaskConfig) -> None:
    """task.names are of the kinds that have them; a decoder may learn all that the store names."""
    names, kind = task.names, f"with task.kind {task.kind}"
    if task.kind not in LEAST_NAMES:
        _require(names is None, "task.names", f"null {kind}", names)
        return
    least = LEAST_NAMES[task.kind]
    expected = f"{least} or more different names {kind}"
    if task.kind in DENSE_KINDS:
        expected = f"null, or {expected}"
        if names is None:
            return
    different = names is not None and len(set(names)) == len(names) >= least
    _require(different, "task.names", expected, names)


def check_recipe(method: MethodConfig, where: str) -> None:
    """Raise ConfigError where the table has no such recipe."""
    near = difflib.get_close_matches(method.recipe, RECIPES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    known = method.recipe in RECIPES
    _require(known, f"{where}: method.recipe", f"one of {', '.join(RECIPES)}", f"{method.recipe}{hint}")


def _check_method(method: MethodConfig) -> None:
    _require(
        (method.regulariser_weight > 0) == (method.regulariser != "none"),
        "method.regulariser_weight",
        "above 0 exactly when method.regulariser is not none",
        f"{method.regulariser_weight} with {method.regulariser}",
    )
    _require(
        method.control != "penalty_only" or method.regulariser != "none",
        "method.regulariser",
        "vicreg with method.control=penalty_only, which has nothing else to train on",
        method.regulariser,
    )
    has_both = recipe_of(method).target == "features" and method.neighbour_weight > 0
    _require(
        method.control != "mismatched_latents" or has_both,
        "method.control",
        "another control, or none, where not both latents and voxels are predicted",
        method.control,
    )


def _check_masks(method: MethodConfig, recipe: Recipe) -> None:
    """Each way of drawing targets needs only its own keys; the loss of neighbours is of visible tokens."""
    name = method.recipe
    is_uniform = "blocks" not in recipe.masks or ("uniform" in recipe.masks and method.mask_ratio is not None)
    needed: tuple[str, ...] = ("mask_ratio",) if is_uniform else BLOCK_KEYS
    if is_uniform and recipe.masks != ("uniform",):
        needed = needed if recipe.masks else ()
        reason = f"recipe {name} and mask_ratio" if recipe.masks else f"recipe {name}, which draws no masks"
        given = {key: value for key in BLOCK_KEYS if (value := getattr(method, key)) is not None}
        names, values = ", method.".join(given), ", ".join(map(str, given.values()))
        _require(not given, f"method.{names}", f"null with {reason}", values)
    if recipe.ema == "cosine":
        needed = (*needed, "ema_base")
    missing = [key for key in needed if getattr(method, key) in (None, [])]
    kind = "at least one family" if missing == ["mask_blocks"] else "a value"
    kind += ", or method.mask_ratio," if not is_uniform and "uniform" in recipe.masks else ""
    _require(not missing, f"method.{', method.'.join(missing)}", f"{kind} with recipe {name}", "none")
    if not is_uniform or not recipe.masks:
        ratio = method.mask_ratio
        _require(ratio is None, "method.mask_ratio", f"null with recipe {name}", ratio)
        total = (method.context_ratio or 0) + (method.target_ratio or 0)
        _require(total <= 1, "method.context_ratio", "context_ratio + target_ratio <= 1", round(total, 6))
    for number, family in enumerate(method.mask_blocks or []):
        key = f"method.mask_blocks[{number}]"
        _require(0 < family.scale <= 1, f"{key}.scale", "a number in (0, 1]", family.scale)
        room = 1 - (method.context_ratio or 0)
        text = f"at most 1 - context_ratio = {room:g}"
        _require(family.scale <= room, f"{key}.scale", text, family.scale)
    _require(
        method.neighbour_weight == 0 or recipe.hidden == "all_but_context",
        "method.neighbour_weight",
        "0 where the encoder computes all tokens",
        f"{method.neighbour_weight} with {method.recipe}",
    )


def _check_head(cfg: Config) -> None:
    """The grid of a head on frozen features."""
    rates, decays = cfg.head.learning_rates, cfg.head.weight_decays
    positive = bool(rates) and all(0 < rate < math.inf for rate in rates)
    _require(positive, "head.learning_rates", "one number above 0 or more", rates)
    allowed = bool(decays) and all(0 <= decay < math.inf for decay in decays)
    _require(allowed, "head.weight_decays", "one number of 0 or more, or several", decays)
    for key, values in (("learning_rates", rates), ("weight_decays", decays)):  # no pair is trained twice
        _require(len(set(values)) == len(values), f"head.{key}", "different numbers", values)


def _check_decoders(cfg: Config) -> None:
    """DENSE_KINDS have separate decoders; labels have none of their keys."""
    task, head, finetune = cfg.task, cfg.head, cfg.finetune
    if task.kind not in DENSE_KINDS:
        kind = f"with task.kind {task.kind}"
        is_decoder = head.kind in ("upsampling", "unetr")
        _require(not is_decoder, "head.kind", f"linear, mlp or attentive {kind}", head.kind)
        _require(not head.voxels, "head.voxels", f"false {kind}", head.voxels)
        _require(not finetune.against_random, "finetune.against_random", f"false {kind}", True)
        _require(cfg.eval.folds is not None, "eval.folds", f"a number {kind}", None)
        return
    kind = f"with task.kind {task.kind}"
    decoders = f"linear, upsampling or unetr {kind}"
    _require(head.kind in ("linear", "upsampling", "unetr"), "head.kind", decoders, head.kind)
    needed = {"linear": False, "unetr": True}.get(head.kind, head.voxels)
    _require(
        head.voxels == needed, "head.voxels", f"{needed} with head.kind {head.kind}".lower(), head.voxels
    )
    planes, size = cfg.grid[0], cfg.train.global_batch_size
    _require(  # an encoder that moves with its decoder is trained on whole volumes
        finetune.encoder == "frozen" or size % planes == 0,
        "train.global_batch_size",
        f"a multiple of {planes}, the planes of a volume, {kind} and finetune.encoder=trained",
        size,
    )
