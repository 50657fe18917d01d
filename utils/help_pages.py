"""--help for people: what a command is for, examples, and the keys that matter; its details come last.

In: the name of a command. Out: a parser whose --help has these around argparse's list of options. Meanings
and defaults of keys are those of docs/reference/configuration.md.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import NoReturn

WIDTH = 100


@dataclass(frozen=True)
class HelpPage:
    """What a person wants to know first."""

    purpose: str
    examples: tuple[str, ...]
    keys: tuple[str, ...] = ()  # of the configuration


DATA_KEYS = ("data.gcs_root", "data.store")
PAGES = {
    "data_setup.expand": HelpPage(
        "Expand the zip archives of a bucket or a folder into a tree of files.",
        ("python -m data_setup.expand --src gs://BUCKET/zips --dst gs://BUCKET/dataset",
         "python -m data_setup.expand --src zips --dst dataset --verify"),
    ),
    "data_setup.phantom": HelpPage(
        "Make a synthetic data set with known anatomy and labels: for the demo, tests and controls.",
        ("python -m data_setup.phantom --out runs/phantom --participants 120 --seed 0 --faults",),
    ),
    "data_setup.prepare": HelpPage(
        "Make the store that training reads: every volume is read, checked and resampled once.",
        ("python -m data_setup.prepare --config configs/smoke_test.yaml",
         "python -m data_setup.prepare --config configs/pretrain_oct_vjepa2.yaml data.gcs_root=FOLDER "
         "data.store=STORE",
         "python -m data_setup.prepare --config configs/smoke_test.yaml --check-only",
         "python -m data_setup.prepare --config configs/smoke_test.yaml --verify"),
        (*DATA_KEYS, "data.device_filter", "data.max_reject_fraction", "spatial.target_spacing",
         "spatial.image_size", "spatial.resample"),
    ),
    "finetuning.embed": HelpPage(
        "Write the features of every volume of a store, or of DICOM files, as a table.",
        ("python -m finetuning.embed --checkpoint runs/smoke_test --store runs/phantom_store --out features",
         "python -m finetuning.embed --checkpoint runs/smoke_test --out features --dicom scans/"),
        ("data.gcs_root", "data.workers", "train.use_bf16", "train.per_core_batch_size"),
    ),
    "finetuning.evaluate": HelpPage(
        "Say what a checkpoint or a head is worth, with intervals and the sentence that they allow.",
        ("python -m finetuning.evaluate --config configs/smoke_test.yaml",
         "python -m finetuning.evaluate --config runs/smoke_test/config.yaml",
         "python -m finetuning.evaluate --head RUN",
         "python -m finetuning.evaluate --same-eye --config runs/smoke_test/config.yaml"),
        ("task.labels_path", "task.label_column", "task.unit", "eval.split", "eval.protocol",
         "model.checkpoint"),
    ),
    "finetuning.compare": HelpPage(
        "Compare checkpoints under one protocol, with corrected differences of all pairs.",
        ("python -m finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints RUN OTHER",),
        ("run.dir", "task.label_column", "eval.split", "eval.protocol"),
    ),
    "finetuning.power": HelpPage(
        "Say how small a difference a cohort can show, before anything is trained.",
        ("python -m finetuning.power --participants 352 --classes 4",
         "python -m finetuning.power --counts 20,30,40 --disagreement 0.3 --effect 0.05 --simulate 500"),
    ),
    "finetuning.predict": HelpPage(
        "Say what a trained head says of scans, with pictures of where the evidence lies, or as files.",
        ("python -m finetuning.predict --checkpoint runs/cls_linear_probe --dicom scans/ --out predictions",
         "python -m finetuning.predict --checkpoint runs/segmentation --rows 0,5 --format nifti --out masks",
         "python -m finetuning.predict --checkpoint runs/segmentation --files scans/eye.dcm --format seg "
         "--out masks",
         "python -m finetuning.predict --checkpoint runs/layers --rows all --format heightmap --out surfaces"),
        ("model.checkpoint", "data.store", "data.workers", "train.use_bf16"),
    ),
    "finetuning.train": HelpPage(
        "Train a head for your labels on a frozen encoder, or fine-tune the whole model.",
        ("python -m finetuning.train --config configs/cls_linear_probe.yaml model.checkpoint=RUN",
         "python -m finetuning.train --config configs/cls_finetune.yaml model.checkpoint=RUN"),
        ("model.checkpoint", "task.labels_path", "task.label_column", "task.kind", "head.kind",
         "finetune.encoder", "optim.base_lr"),
    ),
    "benchmarks.phantom_truth": HelpPage(
        "Ask an encoder what the phantom knows: which layers lie in a token, and how thick they are.",
        ("python -m benchmarks.phantom_truth --config configs/smoke_test.yaml --control runs/smoke_control",),
        ("model.checkpoint", "run.dir"),
    ),
    "models.weights": HelpPage(
        "Read public weights in, give an encoder to others, and check how they feed it.",
        ("python -m models.weights inspect runs/smoke_test/checkpoints/best_probe.pt",
         "python -m models.weights import FILE --config configs/pretrain_oct_vjepa2.yaml --out start.pt",
         "python -m models.weights export --checkpoint runs/smoke_test/checkpoints/best_probe.pt "
         "--portable encoder",
         "python -m models.weights selftest encoder"),
    ),
    "benchmarks.tpu_fit": HelpPage(
        "Ask whether a model fits a TPU that is not here, and how fast it can be at best.",
        ("python -m benchmarks.tpu_fit --config configs/pretrain_oct_vjepa2.yaml --topology v4-32",),
        ("train.per_core_batch_size", "model.size", "train.activation_checkpointing"),
    ),
    "benchmarks.tpu_fit.env": HelpPage(
        "Build the two environments of benchmarks.tpu_fit ahead: 9 GB, minutes.",
        ("python -m benchmarks.tpu_fit.env",),
    ),
    "pretraining.train": HelpPage(
        "Train an encoder without labels on a prepared store; the same command goes on where it stopped.",
        ("python -m pretraining.train --config configs/smoke_test.yaml",
         "python -m pretraining.train --config configs/pretrain_oct_vjepa2.yaml data.store=STORE "
         "run.dir=runs/first",
         "torchrun --nproc-per-node=2 -m pretraining.train --config configs/smoke_test.yaml"),
        ("data.store", "run.dir", "train.max_steps", "train.global_batch_size", "train.per_core_batch_size",
         "train.use_bf16", "optim.base_lr", "model.size", "method.recipe", "wandb.mode"),
    ),
    "utils.report": HelpPage(
        "Write one page about a run, or about several side by side, to be opened in a browser.",
        ("python -m utils.report runs/smoke_test",
         "python -m utils.report runs/smoke_test runs/smoke_control"),
    ),
    "utils.report.pictures": HelpPage(
        "Draw docs/pictures/overview.png and masks.png anew, from a run on the phantom.",
        ("python -m utils.report.pictures --docs",
         "python -m utils.report.pictures --docs --run runs/other"),
    ),
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse's own, whose errors end with where to go from them."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit 2."""
        super().error(f"{message}; examples and all options: {self.prog} --help")


class PeopleParser(Parser):
    """A parser of one command of PAGES; a command that has no page there shows its details alone."""

    def __init__(self, command: str, details: str) -> None:
        super().__init__(prog=f"python -m {command}", formatter_class=argparse.RawDescriptionHelpFormatter)
        self.page, self.details = PAGES.get(command), details.strip()
        if self.page is None:
            self.description = self.details

    def format_help(self) -> str:
        if self.page is not None:
            examples = "\n".join(f"    {example}" for example in self.page.examples)
            self.description = f"{self.page.purpose}\n\nexamples:\n{examples}"
            self.epilog = "\n\n".join(filter(None, (key_lines(self.page.keys), f"details:\n{self.details}")))
        return super().format_help()


def key_lines(names: tuple[str, ...]) -> str:
    """The keys with their meanings and defaults, '' for none."""
    if not names:
        return ""
    from utils.config.keys import keys  # here: only --help reads the schema's text

    lines = ["keys that matter, as section.key=value (all: docs/reference/configuration.md):"]
    for name in names:
        key = keys()[name]
        words = f"{key.meaning} [{key.type.replace('`', '')}; {key.default.strip('*`')}]"
        indent = " " * 31
        lines += textwrap.wrap(
            words, WIDTH, initial_indent=f"  {name:<28} ", subsequent_indent=indent, break_long_words=False
        )
    return "\n".join(lines)
