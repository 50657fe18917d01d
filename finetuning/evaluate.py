"""What a checkpoint or a head is worth, with intervals and the sentence that they allow.

    python -m finetuning.evaluate --config configs/smoke_test.yaml
    python -m finetuning.evaluate --config runs/smoke_test/config.yaml
    python -m finetuning.evaluate --head RUN
    python -m finetuning.evaluate --config configs/layers.yaml model.checkpoint=RUN eval.protocol=crossfit
    python -m finetuning.evaluate --same-eye --config runs/smoke_test/config.yaml

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

--same-eye, with --config or with --head: do several devices agree about one eye
(finetuning/answers/same_eye.py).

Participants that pre-training saw are an error, unless eval.allow_overlap=true; the table then says so.

Keys that matter: task.labels_path, task.label_column, task.unit, eval.split, eval.protocol,
model.checkpoint
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from finetuning.cohort.early import check_task, is_task_file
from utils.cli import add_image_arguments, announce, parse_words, require_there, run_cli
from utils.config.load import load_config, storage_options_of
from utils.config.schema import DENSE_KINDS
from utils.errors import EXIT_STOPPED, UserError
from utils.log import setup_logging


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The words of the command line; raises UserError unless one of --config and --head is there."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--head", metavar="FILE_OR_RUN", help="in place of --config")
        parser.add_argument("--same-eye", action="store_true", help="one eye on several devices")
        add_image_arguments(parser)

    asked = parse_words("finetuning.evaluate", __doc__ or "", argv, add_arguments, needs_config=False)
    if (asked.config is None) == (asked.head is None):
        number = "neither" if asked.head is None else "both"
        raise UserError(f"--config, --head: expected one of them, found {number}")
    return asked


def _page_of_head(asked: argparse.Namespace) -> str | None:
    """The tables of a head of any kind; None where a signal stopped its folds."""
    from finetuning.answers.evaluation import evaluate_head
    from finetuning.answers.evaluation_files import markdown
    from finetuning.answers.same_eye import markdown as same_eye_page
    from finetuning.answers.same_eye import same_eye_of_head
    from finetuning.cohort.source import encoder_place, evaluated_config
    from finetuning.dense.crossfit import crossfit, source_of_head
    from finetuning.dense.evaluation import evaluate
    from finetuning.dense.head import head_kind
    from finetuning.dense.kinds import KINDS
    from finetuning.features.slices import image_encoder_of

    wanted, overrides = asked.head, asked.overrides
    options = storage_options_of(overrides)
    kind = None if asked.same_eye else KINDS.get(head_kind(wanted, options))
    if kind is not None:
        head = kind.open_head(wanted, options, encoder_place(overrides))
        if evaluated_config(head.cfg, head.url, overrides).eval.protocol == "crossfit":
            return crossfit(kind, source_of_head(head, overrides), image_encoder_of(asked), overrides)
    _refuse_image(asked)
    if asked.same_eye:
        return same_eye_page(same_eye_of_head(wanted, overrides))
    return markdown(evaluate_head(wanted, overrides)) if kind is None else evaluate(kind, wanted, overrides)


def _page_of_checkpoint(asked: argparse.Namespace) -> str | None:
    """The same of a configuration, which may be a task's file: then it has the checkpoint's model."""
    from finetuning.answers.evaluation import evaluate, find_checkpoint, printed
    from finetuning.answers.same_eye import markdown, same_eye
    from finetuning.cohort.source import open_source, refuse_unread
    from finetuning.dense.crossfit import crossfit
    from finetuning.dense.kinds import KINDS
    from finetuning.features.slices import image_encoder_of
    from utils.runtime.open import open_runtime

    file, overrides = asked.config, asked.overrides
    cfg = open_source(file, overrides).cfg if is_task_file(file) else load_config(file, overrides)
    if not asked.same_eye and cfg.task.kind in DENSE_KINDS and cfg.eval.protocol == "crossfit":
        refuse_unread(cfg, file, overrides)
        image = image_encoder_of(asked)
        return crossfit(KINDS[cfg.task.kind], open_source(file, overrides), image, overrides)
    _refuse_image(asked)
    if asked.same_eye:
        return markdown(same_eye(cfg, find_checkpoint(cfg)))
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
    asked = parse(argv)
    require_there("--head", asked.head)
    if asked.config:
        check_task(asked.config, asked.overrides)
    announce(f"finetuning.evaluate: {asked.config or asked.head}; the libraries load, which takes seconds")
    setup_logging()
    # each imports what it needs: torch takes seconds, and a wrong command line is refused without it
    text = _page_of_head(asked) if asked.head is not None else _page_of_checkpoint(asked)
    if text is None:
        raise SystemExit(EXIT_STOPPED)
    print(text)


if __name__ == "__main__":
    run_cli(main)
