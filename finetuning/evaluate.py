"""What a checkpoint or a head is worth, with intervals and the sentence that they allow.

    python -m finetuning.evaluate --config configs/smoke_test.yaml
    python -m finetuning.evaluate --config runs/smoke_test/config.yaml
    python -m finetuning.evaluate --head RUN
    python -m finetuning.evaluate --same-eye --config runs/smoke_test/config.yaml

In: a checkpoint of pretraining.train (default: best_probe.pt of the run) or a head of finetuning.train, the
prepared store, labels. Out: a printed table, and in `${run.dir}` evaluation.json, evaluation.md,
predictions.parquet, figures/ and, of a checkpoint's classes, probe.json.

A checkpoint: probes on its encoder (EMA target), on random initialisation (the seed that is best on
validation, in each fold of crossfit its own) and on three baselines without an encoder, and once on permuted
labels, which shows what chance is; then the paired difference pre-trained - random initialisation, its
participant-bootstrap interval, and the sentence that it allows. All follow the protocol of
models.probes.participants: fitted on the training fold, C chosen on the validation fold, scored on the
evaluated one. eval.protocol=official: the splits of the table; crossfit: folds over all labelled participants
that pre-training did not see. A head: finetuning/answers/head_evaluation.py.

--same-eye, with --config or with --head: do several devices agree about one eye
(finetuning/same_eye/run.py).

Participants that pre-training saw are an error, unless eval.allow_overlap=true; the table then says so.

Keys that matter: task.labels_path, task.label_column, task.unit, eval.split, eval.protocol,
model.checkpoint
"""

from __future__ import annotations

from utils.cli import answer_help, parse_words, run_cli

if __name__ == "__main__":  # torch takes seconds to import
    answer_help(
        "finetuning.evaluate",
        __doc__ or "",
        lambda parser: (
            parser.add_argument("--head", metavar="FILE_OR_RUN", help="in place of --config"),
            parser.add_argument("--same-eye", action="store_true", help="one eye on several devices"),
        ),
    )

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from data_setup.store.reader import PreparedStore
from finetuning.answers.evaluation import CLASSES, Asked, Row, answer, known_answer
from finetuning.answers.evaluation_files import TITLES, markdown, write_evaluation
from finetuning.answers.head_evaluation import evaluate_head
from finetuning.answers.metrics import PRIMARY, observed
from finetuning.cohort import source
from finetuning.cohort.cohort import EVALUATED, TRAIN, Cohort, count_overlap, read_cohorts
from finetuning.cohort.source import check_fit
from finetuning.dense.head import head_kind
from finetuning.dense.layers.evaluate import evaluate_layers
from finetuning.dense.segmentation.evaluate import evaluate_segmentation
from finetuning.dense.translation.evaluate import evaluate_translation
from finetuning.features.feature_map import write_feature_map
from finetuning.features.pooled import (
    device_features,
    embed_rows,
    pretrained_encoder,
    random_encoder,
    raw_features,
)
from finetuning.features.probing import (
    RANDOM_SEEDS,
    Probed,
    best_in_each_fold,
    device_cohorts,
    join_folds,
    judged_by,
    of_rows,
    permuted,
    probe,
    random_words,
)
from finetuning.same_eye.run import main as compare_scanners
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.load import load_config, storage_options_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.help_pages import Parser
from utils.log import setup_logging
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime

SHORT = {"balanced_accuracy": "bal. acc.", "macro_auroc": "AUROC"}  # headers of the short table
MAX_COMPONENTS = 256  # of the raw-voxel PCA
# what probe.json repeats of evaluation.json
KEPT = ["fingerprint", "title", "label_column", "split", "protocol", "n_participants", "look", "overlap"]
KEPT += ["n_participants_train", "n_participants_val", "verdict", "cautions", "notes"]
log = logging.getLogger(__name__)
EVALUATE_DENSE = {  # kind of a head's file -> what answers for it
    "layers": evaluate_layers,
    "segmentation": evaluate_segmentation,
    "translation": evaluate_translation,
}


def find_checkpoint(cfg: Config) -> str:
    """model.checkpoint, else best_probe.pt of this run; UserError names the missing file."""
    if cfg.model.checkpoint is not None:
        return source.find_checkpoint(cfg.model.checkpoint, cfg.data.storage_options)
    if cfg.train.ckpt_dir is None:
        raise UserError("model.checkpoint: expected a checkpoint, found null, and train.ckpt_dir is null too")
    url = storage.join(cfg.train.ckpt_dir, "best_probe.pt")
    if not storage.exists(url, cfg.data.storage_options):
        raise UserError(
            f"{url}: expected the checkpoint with the best validation probe, found none; pretraining.train "
            "writes it where val participants have labels; name another one with --checkpoint URL"
        )
    return url


def evaluate(cfg: Config, runtime: Runtime) -> dict[str, Any]:
    """The short table of a checkpoint (the content of probe.json, where the task has classes); an existing
    evaluation.json of the same checkpoint and configuration is reused.
    """
    url = find_checkpoint(cfg)
    state = load_checkpoint(url, cfg.data.storage_options)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, state, url)
    cohorts = tuple(read_cohorts(cfg, store, state["participants"]))
    overlap = sum(count_overlap(cfg, cohort, state["participants"], url) for cohort in cohorts)
    asked = Asked(cfg, store, cohorts, overlap, state["checksum"])
    known = known_answer(asked)
    if known is None:
        known = _evaluate(asked, state, url, runtime)
    return short_table(known)


def _evaluate(asked: Asked, state: dict[str, Any], url: str, runtime: Runtime) -> dict[str, Any]:
    """Embed, probe, write all files; returns the content of evaluation.json."""
    cfg, store = asked.cfg, asked.store
    log.info(
        "%d volumes, %s of %s, %d evaluated participants",
        len(asked.rows),
        asked.cohort.kind,
        ", ".join(asked.cohort.names),
        asked.people(EVALUATED),
    )
    encoder = pretrained_encoder(cfg, state, url)
    pretrained = of_rows(
        asked.rows, embed_rows(encoder, cfg, store, asked.rows, runtime, "pre-trained features")
    )
    about = f"{url.rpartition('/')[2]} (step {state['step']})"
    write_feature_map(cfg.run.dir, asked.cohort, pretrained(asked.cohort), store.index, about)
    first = _row("pretrained", "pre-trained encoder (EMA target)", probe(asked.cohorts, pretrained))
    shuffled = [permuted(cohort, cfg.seed) for cohort in asked.cohorts]
    chance = judged_by(asked.cohorts, probe(shuffled, pretrained))
    second, notes = _random_row(asked, runtime)
    rows = [first, second, *_baselines(asked, runtime)]
    rows.append(_row("permuted", "pre-trained, labels permuted (chance)", chance))
    of_device, _ = device_cohorts(asked.cohorts, store)
    content = answer(
        asked,
        rows,
        second,
        ("Pre-training", "random initialisation"),
        probe(of_device, pretrained).scored if of_device else None,
        {"name": "probe", "url": url, "sha256": state["checksum"], "step": state["step"]},
        notes,
    )
    of_report = storage.join(cfg.run.dir, "probe.json")
    if content["kind"] in CLASSES:
        text = json.dumps(short_table(content), indent=1, allow_nan=False) + "\n"
        storage.write_text(of_report, text)
    elif storage.exists(of_report):  # the table of another task, which the report would show
        storage.remove(of_report)
    write_evaluation(cfg.run.dir, content, {row.name: row.scored for row in rows}, store.index)
    return content


def _random_row(asked: Asked, runtime: Runtime) -> tuple[Row, list[str]]:
    """Random initialisation: in each fold the seed that is best on validation, and what the others did."""
    cfg = asked.cfg
    seeds = range(cfg.seed, cfg.seed + RANDOM_SEEDS)
    arms = []
    for s in seeds:
        title = f"random features, seed {s} of {seeds[0]} to {seeds[-1]}"
        values = embed_rows(random_encoder(cfg, s), cfg, asked.store, asked.rows, runtime, title)
        arms.append([probe([cohort], of_rows(asked.rows, values)) for cohort in asked.cohorts])
    best = best_in_each_fold([[part.val_score for part in arm] for arm in arms])
    chosen = join_folds([arms[number][fold] for fold, number in enumerate(best)])
    metric = PRIMARY[asked.cohort.kind]
    joined = [join_folds(arm) for arm in arms]
    here = [observed(arm.scored.evaluated()).overall[metric][0] for arm in joined]
    each = ", ".join(
        f"seed {s}: {arm.val_score:.3f} on val, {value:.3f} here"
        for s, arm, value in zip(seeds, joined, here, strict=True)
    )
    label, rule = random_words([seeds[number] for number in best])
    return _row("random_init", f"random initialisation ({label})", chosen), [
        f"Random initialisation is {rule} ({each})."
    ]


def _baselines(asked: Asked, runtime: Runtime) -> list[Row]:
    """Rows without an encoder."""
    voxels, profile = raw_features(asked.cfg, asked.store, asked.rows, runtime)
    voxels_of = of_rows(asked.rows, voxels)

    def components(cohort: Cohort) -> np.ndarray:
        """The principal components of the training fold."""
        is_train, raw = cohort.fold == TRAIN, voxels_of(cohort)
        pca = PCA(min(MAX_COMPONENTS, int(is_train.sum()) - 1, raw.shape[1]), random_state=0)
        return pca.fit(raw[is_train]).transform(raw)

    def device(cohort: Cohort) -> np.ndarray:
        return device_features(asked.store, cohort.rows, cohort.rows[cohort.fold == TRAIN])

    return [
        _row("voxel_pca", "raw-voxel PCA", probe(asked.cohorts, components)),
        _row("ascan_profile", "mean A-scan profile", probe(asked.cohorts, of_rows(asked.rows, profile))),
        _row("device", "device one-hot", probe(asked.cohorts, device)),
    ]


def _row(name: str, label: str, probed: Probed) -> Row:
    facts = {
        "chosen_c": probed.chosen_c,
        "val_score": probed.val_score,
        "num_features": probed.num_features,
    }
    return Row(name, label, probed.scored, facts)


def short_table(content: dict[str, Any]) -> dict[str, Any]:
    """The table as probe.json holds it: the primary metric, macro AUROC, and how C was chosen."""
    metric, is_class = content["difference"]["metric"], content["kind"] in CLASSES
    rows = [
        {
            "name": row["name"],
            "label": row["label"],
            metric: row["metrics"][metric]["value"],
            "ci95": row["metrics"][metric]["ci95"],
            **({"macro_auroc": row["metrics"]["macro_auroc"]["value"]} if is_class else {}),
            "chosen_c": row["chosen_c"],
            f"val_{metric}" if is_class else "val_score": row["val_score"],
            "num_features": row["num_features"],
        }
        for row in content["rows"]
    ]
    return {
        "format_version": content["format_version"],
        "metric": metric,
        "checkpoint": content["subject"]["url"],
        "checkpoint_sha256": content["subject"]["sha256"],
        "step": content["subject"]["step"],
        "classes": content["names"],
        "rows": rows,
        "paired_difference": {k: content["difference"][k] for k in ("mean", "ci95", "could_have_shown")},
        **{key: content[key] for key in KEPT},
    }


def format_table(result: dict[str, Any]) -> str:
    """The short table for a terminal, the verdict last."""
    metric = result["metric"]
    lines = [
        result["title"],
        f"{'features':<37} {SHORT.get(metric, TITLES[metric]):>9}  {'95 % interval':<15} {'AUROC':>6} "
        f"{'val':>6} {'C':>7}",
    ]
    for row in result["rows"]:
        auroc = "-" if row.get("macro_auroc") is None else f"{row['macro_auroc']:.3f}"
        on_val = row[f"val_{metric}"] if f"val_{metric}" in row else row["val_score"]
        lines.append(
            f"{row['label']:<37} {_number(row[metric]):>9}  {_interval(row['ci95']):<15} {auroc:>6} "
            f"{on_val:>6.3f} {row['chosen_c']:>7g}"
        )
    return "\n".join([*lines, *result["notes"], *result["cautions"], result["verdict"]])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(ci95: Sequence[float] | None) -> str:
    return "-" if ci95 is None else f"{ci95[0]:.3f} to {ci95[1]:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoint of a configuration, or a head, and print its table."""
    words = sys.argv[1:] if argv is None else list(argv)
    setup_logging()
    if "--same-eye" in words:
        compare_scanners(words, find_checkpoint)
        return
    if any(word == "--head" or word.startswith("--head=") for word in words):
        parser = Parser(prog="python -m finetuning.evaluate")
        parser.add_argument("--head", required=True, metavar="FILE_OR_RUN")
        parser.add_argument("overrides", nargs="*", metavar="section.key=value")
        args = parser.parse_intermixed_args(words)
        kind = head_kind(args.head, storage_options_of(args.overrides))
        if kind in EVALUATE_DENSE:
            print(EVALUATE_DENSE[kind](args.head, args.overrides))
            return
        print(markdown(evaluate_head(args.head, args.overrides)))
        return
    asked = parse_words("finetuning.evaluate", __doc__ or "", words)
    if source.is_task_file(asked.config):
        cfg = source.open_source(asked.config, asked.overrides).cfg
    else:
        cfg = load_config(asked.config, asked.overrides)
    print(format_table(evaluate(cfg, open_runtime(cfg.train.use_bf16))))
    log.info("next: python -m utils.report %s", shlex.quote(cfg.run.dir))


if __name__ == "__main__":
    run_cli(main)
