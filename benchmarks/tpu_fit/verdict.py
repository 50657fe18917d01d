"""What `benchmarks.tpu_fit` concludes from a compiled step, and how it tells it.

In: what was traced and what the compiler says, both of one device, and the slice's datasheet. Out: a dict for
JSON and text. Every time is a floor: the datasheet's peaks, with nothing in between.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tpu_fit.topologies import TOPOLOGIES
from utils.config.schema import Config

Facts = dict[str, Any]
GIB = 2.0**30
CLOSE = 0.10  # counts further apart are explained
# what is no matrix product may explain that much more, or anything in a step as small as those of tests
EXPLAINED, SMALL_STEP_FLOPS = 0.5, 1e11
PARTS = ("parameters", "target", "optimizer", "batch")


def facts_of(config: str, topology: str, cfg: Config, traced: Facts, compiled: Facts, volumes: int) -> Facts:
    """The numbers of one configuration on one slice; null where a program that does not fit has none."""
    place, train = TOPOLOGIES[topology], cfg.train
    facts: Facts = {
        "config": config,
        "topology": topology,
        "per_core_batch_size": train.at_once,
        "global_batch_size": train.global_batch_size,
        "micro_batches": traced["accumulation"],
        "activation_checkpointing": train.activation_checkpointing,
        "tpu_attention": cfg.model.tpu_attention,
        "fits": "out_of_hbm" not in compiled,
        "hbm_gib": place.hbm_gib,
        "hbm_parts_gib": {part: traced["bytes"][part] / GIB for part in PARTS},
        "flops_per_step": sum(traced["flops"].values()),
        "flops_parts": traced["flops"],
        "data_set_volumes": volumes,
        "libtpu": compiled["libtpu"],
        "worker_libtpu": traced["worker_libtpu"],
    }
    if not facts["fits"]:
        wanted, room = (compiled["out_of_hbm"][key] / GIB for key in ("wanted_bytes", "available_bytes"))
        unknown = (
            "xla_flops_per_step",
            "bytes_per_step",
            "collective_bytes",
            "step_floor_s",
            "volumes_per_s",
        )
        return facts | {"hbm_used_gib": wanted, "hbm_available_gib": room} | dict.fromkeys(unknown)
    used = sum(compiled[f"{part}_bytes"] for part in ("argument", "output", "temporary", "code"))
    used_gib = (used - compiled["alias_bytes"]) / GIB
    parts = facts["hbm_parts_gib"]
    parts["activations and temporaries"] = used_gib - sum(parts.values())
    between = sum(entry["bytes"] for entry in compiled["collectives"].values())
    floors = {
        "arithmetic": max(facts["flops_per_step"], compiled["flops"]) / (place.bf16_tflop_per_s * 1e12),
        "memory traffic": compiled["bytes_accessed"] / (place.hbm_gb_per_s * 1e9),
        "traffic between chips": between / (place.link_gb_per_s * 1e9),
    }
    floor = max(floors.values())
    rate = train.global_batch_size / floor
    return facts | {
        "hbm_used_gib": used_gib,
        "updated_in_place_gib": compiled["alias_bytes"] / GIB,
        "xla_flops_per_step": compiled["flops"],
        "bytes_per_step": compiled["bytes_accessed"],
        "collectives": compiled["collectives"],
        "collective_bytes": between,
        "floors_s": floors,
        "step_floor_s": floor,
        "volumes_per_s": rate,
        "epochs_per_hour": rate * 3600 / volumes,
        "host_volumes_per_s": rate / place.hosts,
        "host_mb_per_s": rate / place.hosts * traced["volume_bytes"] / 1e6,
    }


def describe(facts: Facts) -> str:
    """The lines that a researcher reads."""
    place = TOPOLOGIES[facts["topology"]]
    steps = "1 micro-batch" if facts["micro_batches"] == 1 else f"{facts['micro_batches']} micro-batches"
    hosts = "1 host" if place.hosts == 1 else f"{place.hosts} hosts"
    per_chip, in_all = facts["per_core_batch_size"], facts["global_batch_size"]
    lines = [
        f"{facts['config']} on {facts['topology']}",
        f"slice            {place.chips} chips of {place.hbm_gib:g} GiB, {hosts}",
        f"batch            {per_chip} per chip, {steps}, {in_all} in all",
        f"compiler         {_compiler(facts)}",
    ]
    parts = ", ".join(f"{name} {size:.2f}" for name, size in facts["hbm_parts_gib"].items())
    if not facts["fits"]:
        room = facts["hbm_available_gib"]
        lines.append(
            f"memory           DOES NOT FIT: wants {facts['hbm_used_gib']:.2f} of {room:.2f} GiB ({parts})"
        )
        lines.append(
            f"arithmetic       {_tera(facts['flops_per_step'])} TFLOP per chip and step: {_parts(facts)}"
        )
        if "largest_batch_that_fits" in facts:
            lines.append(f"what fits        {_advice(facts)}")
        return "\n".join(lines)
    moved = ", ".join(f"{e['count']} {name}" for name, e in facts["collectives"].items()) or "none"
    floors = ", ".join(f"{name} {seconds:.3f}" for name, seconds in facts["floors_s"].items())
    lines += [
        f"memory           fits: {facts['hbm_used_gib']:.2f} of {facts['hbm_gib']:g} GiB per chip ({parts})",
        f"arithmetic       {_tera(facts['flops_per_step'])} TFLOP per chip and step: {_parts(facts)}",
        f"                 XLA counts {_tera(facts['xla_flops_per_step'])}: {_difference(facts)}",
        f"memory traffic   {facts['bytes_per_step'] / 1e9:.1f} GB per chip and step",
        f"between chips    {facts['collective_bytes'] / 1e9:.2f} GB per chip and step: {moved}",
        f"step             at least {facts['step_floor_s']:.3f} s by the datasheet ({floors})",
        f"speed            at most {facts['volumes_per_s']:.0f} volumes/s",
        f"                 {facts['epochs_per_hour']:.2f} epochs an hour of {facts['data_set_volumes']} "
        "volumes",
        f"input pipeline   per host at that speed {facts['host_volumes_per_s']:.0f} volumes/s, "
        f"{facts['host_mb_per_s']:.0f} MB/s",
    ]
    return "\n".join(lines)


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.2f}"


def _compiler(facts: Facts) -> str:
    """Whose numbers these are, and whether a TPU worker compiles with the same."""
    own, workers = facts["libtpu"], facts["worker_libtpu"]
    if own == workers:
        return f"libtpu {own}, as on a TPU worker"
    return f"libtpu {own}, on a TPU worker {workers}: memory and traffic are near those there, not the same"


def _parts(facts: Facts) -> str:
    return ", ".join(f"{purpose} {_tera(count)}" for purpose, count in facts["flops_parts"].items())


def _difference(facts: Facts) -> str:
    """XLA's operation count against the one from the shapes, and the reason for a difference."""
    share = facts["xla_flops_per_step"] / facts["flops_per_step"] - 1
    if abs(share) <= CLOSE:
        return f"{share:+.0%}"
    if 0 < share <= EXPLAINED or (share > 0 and facts["flops_per_step"] < SMALL_STEP_FLOPS):
        return (
            f"{share:+.0%}, since it also counts what is no matrix product: softmax, norms, GELU, random "
            "numbers, normalisation of the volumes, optimizer"
        )
    kind = "fewer than" if share < 0 else "far more than"
    return f"{share:+.0%}: {kind} the products of the shapes, so do not trust either before you know why"


def _advice(facts: Facts) -> str:
    best = facts["largest_batch_that_fits"]
    if best is not None:
        return f"train.per_core_batch_size={best}"
    options = {
        "train.activation_checkpointing=true": not facts["activation_checkpointing"],
        "model.tpu_attention=flash": facts["tpu_attention"] != "flash",
    }
    helps = " ".join(change for change, is_new in options.items() if is_new)
    return f"no smaller batch of this global batch; try {helps or 'a smaller model or image'}"
