"""Train a head for your labels on a frozen encoder, or fine-tune the whole model.

    python -m finetuning.train --config configs/cls_linear_probe.yaml model.checkpoint=RUN
    python -m finetuning.train --config configs/cls_finetune.yaml model.checkpoint=RUN

In: a task's file of configs/, a checkpoint of pretraining.train or its run's folder, the prepared store that
it was trained on, labels. Out: `${train.ckpt_dir}/head.pt`, which finetuning.evaluate reads. Data, geometry,
model and method are those of the checkpoint. finetune.encoder=frozen: heads on kept features
(finetuning/heads/frozen.py); trained: the whole model (finetuning/heads/finetune.py). task.kind=layers,
segmentation or translation: surfaces of the retina, classes of voxels or slabs of OCTA flow
(finetuning/dense/kinds.py). Exit codes: utils/errors.py.

Keys that matter: model.checkpoint, task.labels_path, task.label_column, task.kind, head.kind,
finetune.encoder, optim.base_lr
"""

from __future__ import annotations

from finetuning.cohort.labels import check_task
from utils.cli import answer_early, parse_words, run_cli

if __name__ == "__main__":  # torch and scikit-learn take seconds to import
    answer_early("finetuning.train", __doc__ or "", parse_words, check_task)

import logging
import os
import shlex
from collections.abc import Sequence
from typing import Any

from data_setup.store.reader import PreparedStore
from finetuning.cohort.cohort import count_overlap, read_cohort, summary
from finetuning.cohort.source import Source, check_fit, open_source, refuse_unread
from finetuning.heads.frozen import train_frozen
from finetuning.heads.head_file import NAME
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.schema import DENSE_KINDS
from utils.errors import EXIT_FINISHED, ConfigError, UserError
from utils.log import setup_logging
from utils.run.folder import held_run
from utils.run.guard import open_engine
from utils.runtime.open import open_runtime
from utils.tables import ON_VALIDATION, Table, terminal
from utils.terminal import say

log = logging.getLogger(__name__)


def train(config: str, overrides: Sequence[str]) -> int:
    """Train what the configuration asks for; returns the exit code. Raises UserError."""
    source = open_source(config, overrides)
    cfg = source.cfg
    refuse_unread(cfg, config, overrides)
    if cfg.train.ckpt_dir is None:
        raise ConfigError("train.ckpt_dir: expected a folder for the head, found null")
    is_dense = cfg.task.kind in DENSE_KINDS
    if (is_dense or cfg.finetune.encoder == "frozen") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what = f"task.kind={cfg.task.kind}" if is_dense else "finetune.encoder=frozen"
        raise UserError(f"{what}: expected one process, found torchrun with several")
    if cfg.eval.protocol == "crossfit":
        raise ConfigError(
            "eval.protocol: expected official, found crossfit: a head has one training set; "
            "finetuning.evaluate, with --head too, and finetuning.compare train one a fold"
        )
    if is_dense:
        from finetuning.dense.kinds import KINDS
        from finetuning.dense.training import train_head

        refuse_another_encoder(source)
        return train_head(KINDS[cfg.task.kind], source)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, source.state, source.url)
    cohort = read_cohort(cfg, store)
    overlap = count_overlap(cfg, cohort, source.state["participants"], source.url)
    log.info(
        "%s; pre-training saw %d of the evaluated participants",
        f"{cohort.kind}: {summary(cohort.fold, cohort.person)}",
        overlap,
    )
    if cfg.finetune.encoder == "trained":
        from finetuning.heads.finetune import finetune

        with open_engine(cfg) as runtime:
            return finetune(source, store, cohort, runtime)
    runtime = open_runtime(cfg.train.use_bf16)
    with held_run(cfg, runtime):  # the folder of another run keeps its files
        refuse_another_encoder(source)
        url, state = train_frozen(source, store, cohort, runtime)
    print(format_grid(state["validation"]))
    say(f"head: {url}", f"next: python -m finetuning.evaluate --head {shlex.quote(url)}")
    return EXIT_FINISHED


def refuse_another_encoder(source: Source) -> None:
    """Raise UserError where the run's head, which would be overwritten, is of another checkpoint."""
    cfg = source.cfg
    url = storage.join(str(cfg.train.ckpt_dir), f"{NAME}.pt")
    if not storage.exists(url, cfg.data.storage_options):
        return
    trained_on = load_checkpoint(url, cfg.data.storage_options)["encoder"]["checksum"]
    if trained_on != source.state["checksum"]:
        raise UserError(
            f"{url}: expected a head of {source.url}, sha256 {source.state['checksum'][:12]}, found one of "
            f"{trained_on[:12]}; use another run.dir"
        )


def format_grid(validation: dict[str, Any]) -> str:
    """Every pair of the grid at its best epoch, and which one is kept."""
    rows = []
    for row in validation["grid"]:
        pair = row["learning_rate"], row["weight_decay"]
        mark = "kept" if pair == (validation["learning_rate"], validation["weight_decay"]) else ""
        scores = f"{row['score']:.4f}", f"{row['loss']:.4f}"
        rows.append([*(f"{number:g}" for number in pair), str(row["epoch"]), *scores, mark])
    header = ["learning rate", "weight decay", "epoch", validation["metric"], "loss", ""]
    return terminal(Table("", header, rows, ON_VALIDATION))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_words("finetuning.train", __doc__ or "", argv)
    setup_logging()
    return train(args.config, args.overrides)


if __name__ == "__main__":
    run_cli(main)
