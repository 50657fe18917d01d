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
validation, in each fold of crossfit its own) and on three baselines without an encoder, and once on permuted
labels, which shows what chance is; then the paired difference pre-trained - random initialisation, its
participant-bootstrap interval, and the sentence that it allows. All follow the protocol of
models.probes.participants: fitted on the training fold, C chosen on the validation fold, scored on the
evaluated one. eval.protocol=official: the splits of the table; crossfit: folds over all labelled participants
that pre-training did not see. A head: finetuning/answers/head_evaluation.py.

Of layers, voxels or slabs, a task's file or a head with eval.protocol=crossfit: a head in each of eval.folds
parts of the people (null: leave one person out), beside it a U-Net that has as much processor time, and with
--image-encoder its decoder on an image model, in one table (finetuning/dense/crossfit.py).

--same-eye, with --config or with --head: do several devices agree about one eye
(finetuning/same_eye/run.py).

Participants that pre-training saw are an error, unless eval.allow_overlap=true; the table then says so.

Keys that matter: task.labels_path, task.label_column, task.unit, eval.split, eval.protocol,
model.checkpoint
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetuning.cohort.labels import check_table
from utils.cli import add_image_arguments, announce, parse_words, require_there, run_cli
from utils.config.load import load_config, storage_options_of
from utils.config.schema import DENSE_KINDS, Config
from utils.errors import EXIT_STOPPED, UserError
from utils.log import setup_logging

if TYPE_CHECKING:
    from finetuning.features.slices import SliceEncoder

log = logging.getLogger(__name__)


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


def evaluate_any_head(asked: argparse.Namespace) -> str | None:
    """The tables of a head of any kind as text; None where a signal stopped its folds."""
    from finetuning.answers.evaluation_files import markdown
    from finetuning.answers.head_evaluation import evaluate_head
    from finetuning.cohort.source import encoder_place, evaluated_config
    from finetuning.dense.crossfit import crossfit, source_of_head
    from finetuning.dense.evaluation import evaluate
    from finetuning.dense.head import head_kind
    from finetuning.dense.kinds import KINDS

    wanted, overrides = asked.head, asked.overrides
    options = storage_options_of(overrides)
    kind = KINDS.get(head_kind(wanted, options))
    if kind is None:
        _refuse_image(asked)
        return markdown(evaluate_head(wanted, overrides))
    head = kind.open_head(wanted, options, encoder_place(overrides))
    if evaluated_config(head.cfg, head.url, overrides).eval.protocol == "crossfit":
        return crossfit(kind, source_of_head(head, overrides), _image(asked), overrides)
    _refuse_image(asked)
    return evaluate(kind, wanted, overrides)


def _image(asked: argparse.Namespace) -> SliceEncoder | None:
    from finetuning.features.slices import image_encoder_of

    return image_encoder_of(asked)


def _refuse_image(asked: argparse.Namespace) -> None:
    """Raise UserError for words that only folds of decoders read."""
    if asked.image_encoder is not None:
        raise UserError(
            "--image-encoder: expected eval.protocol=crossfit and a task of layers, segmentation or "
            "translation, found another question; finetuning.compare takes it for labels of people"
        )


def _folds_of_task(asked: argparse.Namespace, cfg: Config) -> str | None:
    """The page of a dense task's file with crossfit; None where a signal stopped it."""
    from finetuning.cohort.source import open_source
    from finetuning.cohort.unread import refuse_unread
    from finetuning.dense.crossfit import crossfit
    from finetuning.dense.kinds import KINDS

    refuse_unread(cfg, asked.config, asked.overrides)
    source = open_source(asked.config, asked.overrides)
    return crossfit(KINDS[cfg.task.kind], source, _image(asked), asked.overrides)


def _config_of(asked: argparse.Namespace) -> Config:
    """A whole configuration, or a task's file with the checkpoint's model."""
    from finetuning.cohort import source

    if source.is_task_file(asked.config):
        return source.open_source(asked.config, asked.overrides).cfg
    return load_config(asked.config, asked.overrides)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoint of a configuration, or a head, and print its table."""
    asked = parse(argv)
    require_there("--head", asked.head)
    if asked.config:
        check_table(asked.config, asked.overrides)
    announce(f"finetuning.evaluate: {asked.config or asked.head}; the libraries load, which takes seconds")
    setup_logging()
    # here: torch takes seconds to import, and a wrong command line is refused without it
    from finetuning.answers.checkpoint_evaluation import evaluate, find_checkpoint, printed
    from finetuning.same_eye.page import markdown
    from finetuning.same_eye.run import same_eye, same_eye_of_head
    from utils.runtime.open import open_runtime

    cfg = None if asked.head is not None else _config_of(asked)
    is_dense = cfg is not None and cfg.task.kind in DENSE_KINDS and cfg.eval.protocol == "crossfit"
    if asked.same_eye or not (is_dense or asked.head is not None):
        _refuse_image(asked)
    if asked.head is not None and asked.same_eye:
        print(markdown(same_eye_of_head(asked.head, asked.overrides)))
    elif asked.same_eye:
        assert cfg is not None
        print(markdown(same_eye(cfg, find_checkpoint(cfg))))
    elif cfg is None or is_dense:
        text = evaluate_any_head(asked) if cfg is None else _folds_of_task(asked, cfg)
        if text is None:
            raise SystemExit(EXIT_STOPPED)
        print(text)
    else:
        print(printed(evaluate(cfg, open_runtime(cfg.train.use_bf16))))
        log.info("next: python -m utils.report %s", shlex.quote(cfg.run.dir))


if __name__ == "__main__":
    run_cli(main)
