"""What a checkpoint or a head is worth, with intervals and the sentence that they allow.

    python -m finetuning.evaluate --config configs/smoke_test.yaml
    python -m finetuning.evaluate --config runs/smoke_test/config.yaml
    python -m finetuning.evaluate --head RUN
    python -m finetuning.evaluate --config configs/layers.yaml model.checkpoint=RUN eval.protocol=crossfit

In: a checkpoint of pretraining.train (default: best_probe.pt of the run) or a head of finetuning.train, the
prepared store, labels. Out: a printed table, and in `${run.dir}` evaluation.json, evaluation.md,
predictions.parquet and figures/.

A checkpoint: probes on its encoder (EMA target), on random initialisation (the seed that is best on
validation, in each fold of crossfit its own) and on three baselines without an encoder; then the paired
difference pre-trained - random initialisation, its participant-bootstrap interval, and the sentence that it
allows. All follow the protocol of
models.probes.participants: fitted on the training fold, C chosen on the validation fold, scored on the
evaluated one. eval.protocol=official: the splits of the table; crossfit: folds over all labelled participants
that pre-training did not see. A head: finetuning/answers/evaluation.py.

Of layers, voxels or slabs, a task's file or a head with eval.protocol=crossfit: a head in each of eval.folds
parts of the people (null: leave one person out), beside it a U-Net that has as much processor time, and with
--image-encoder its decoder on an image model, in one table (finetuning/dense/crossfit.py).

Participants that pre-training saw are an error, unless eval.allow_overlap=true; the table then says so.

Keys that matter: task.labels_path, task.label_column, task.unit, eval.split, eval.protocol,
model.checkpoint
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from finetuning.cohort.labels import is_task_file, parse_config_or_head
from utils.cli import add_image_arguments, announce, run_cli
from utils.config.load import load_config, storage_options_of
from utils.config.schema import DENSE_KINDS
from utils.errors import EXIT_STOPPED, UserError
from utils.log import setup_logging


def _page_of_head(asked: argparse.Namespace) -> str | None:
    """The tables of a head of any kind; None where a signal stopped its folds."""
    from finetuning.answers.evaluation import evaluate_head
    from finetuning.answers.evaluation_files import markdown
    from finetuning.cohort.source import encoder_place, evaluated_config
    from finetuning.dense.crossfit import crossfit, source_of_head
    from finetuning.dense.evaluation import evaluate
    from finetuning.dense.head import head_kind
    from finetuning.dense.kinds import KINDS
    from finetuning.features.slices import image_encoder_of

    wanted, overrides = asked.head, asked.overrides
    options = storage_options_of(overrides)
    kind = KINDS.get(head_kind(wanted, options))
    if kind is not None:
        head = kind.open_head(wanted, options, encoder_place(overrides))
        if evaluated_config(head.cfg, head.url, overrides).eval.protocol == "crossfit":
            return crossfit(kind, source_of_head(head, overrides), image_encoder_of(asked), overrides)
    _refuse_image(asked)
    return markdown(evaluate_head(wanted, overrides)) if kind is None else evaluate(kind, wanted, overrides)


def _page_of_checkpoint(asked: argparse.Namespace) -> str | None:
    """The same of a configuration, which may be a task's file: then it has the checkpoint's model."""
    from finetuning.answers.evaluation import evaluate, printed
    from finetuning.cohort.source import open_source, refuse_unread
    from finetuning.dense.crossfit import crossfit
    from finetuning.dense.kinds import KINDS
    from finetuning.features.slices import image_encoder_of
    from utils.runtime.open import open_runtime

    file, overrides = asked.config, asked.overrides
    cfg = open_source(file, overrides).cfg if is_task_file(file) else load_config(file, overrides)
    if cfg.task.kind in DENSE_KINDS and cfg.eval.protocol == "crossfit":
        refuse_unread(cfg, file, overrides)
        image = image_encoder_of(asked)
        return crossfit(KINDS[cfg.task.kind], open_source(file, overrides), image, overrides)
    _refuse_image(asked)
    if cfg.task.kind not in DENSE_KINDS and cfg.head.kind != "linear":
        raise UserError(
            f"head.kind: expected linear of a checkpoint, which a logistic or ridge probe reads, found "
            f"{cfg.head.kind}; train that head by finetuning.train and name it by --head"
        )
    text = printed(evaluate(cfg, open_runtime(cfg.train.use_bf16)))
    return f"{text}\nnext: python -m utils.report {shlex.quote(cfg.run.dir)}"


def _refuse_image(asked: argparse.Namespace) -> None:
    """Raise UserError for words that only folds of decoders read."""
    if asked.image_encoder is not None:
        raise UserError(
            "--image-encoder: expected eval.protocol=crossfit and a task of layers, segmentation or "
            "translation, found another question; finetuning.compare takes it for labels of people"
        )


def main(argv: Sequence[str] | None = None) -> None:
    asked = parse_config_or_head("finetuning.evaluate", __doc__ or "", argv, add_image_arguments)
    announce(f"finetuning.evaluate: {asked.config or asked.head}; the libraries load, which takes seconds")
    setup_logging()
    # each imports what it needs: torch takes seconds, and a wrong command line is refused without it
    text = _page_of_head(asked) if asked.head is not None else _page_of_checkpoint(asked)
    if text is None:
        raise SystemExit(EXIT_STOPPED)
    print(text)


if __name__ == "__main__":
    run_cli(main)
