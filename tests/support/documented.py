"""The commands of the documents, and what runs each of them.

A page's commands are run in a folder of their own: phantoms first, then in the page's order. What a page
takes for granted stands there, less what the page makes itself; names in capitals are files of that name.
Buckets and absolute paths become folders of this folder (`PLACES`), and words that make a run tiny are added
to those of the text (`BEFORE`, `TINY`). Every other word is the text's. documented.yaml has what is
different for a page.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.test_readme import PAGES, blocks, prose

LINE = re.compile(
    r" *(?:[A-Z_]+=\S+ )*(?:until )?(?:python|torchrun .*?) "
    r"(?:-m (?P<words>\w[\w.]*(?: .*?)?)|(?P<file>[\w/]+\.py(?: .*?)?))(?:; do)?$"
)
SPAN = re.compile(r"`((?:python|torchrun[^`]*?)\s+-m\s+[\w.]+\s[^`]+|python\s+[\w/]+\.py[^`]*)`")
TARGET = re.compile(r"^ *make ([a-z-]+)|`make\s+([a-z-]+)", re.MULTILINE)
# What was measured, and with which command: the guides have the commands to run
RECORDS = ("docs/evidence/", "docs/LOG.md", "CHANGELOG.md")

TABLE = Path(__file__).with_suffix(".yaml")
PLACES = {"gs://BUCKET": "BUCKET", "/data/": "data/", "/mnt/": "mnt/"}
GRID = "spatial.target_spacing=[0.75,0.096,0.1875] spatial.image_size=[8,24,32] spatial.patch_size=[4,8,8]"
BEFORE = {  # where the text ends with a list
    "finetuning.embed": "data.workers=0",
    "finetuning.predict": "data.workers=0",
}
TINY = {
    "data_setup.phantom": "--participants 2 --size small --workers 0",
    "data_setup.prepare": f"--workers 0 {GRID}",
    "pretraining.train": f"{GRID} data.workers=0 model.size=ti method.predictor_depth=2 "
    "method.predictor_width=64 train.global_batch_size=4 train.per_core_batch_size=4 train.max_steps=2 "
    "train.val_every_steps=2 train.ckpt_every_steps=2 train.log_every_steps=1 train.use_bf16=false "
    "val.max_volumes=8 wandb.mode=disabled",
    "finetuning.train": "data.workers=0 train.epochs=1 wandb.mode=disabled",
    "finetuning.compare": "--columns devices",
}


@dataclass(frozen=True)
class Command:
    """One command of a page: its text in one line, its module or file, the words after it."""

    text: str
    module: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """How the commands of a page are run; documented.yaml says what each key is."""

    makes: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()
    stands: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    tiny: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)


def how_pages_are_run() -> dict[str, Page]:
    """documented.yaml."""
    content = yaml.safe_load(TABLE.read_text())
    del content["make"]
    return {
        page: Page(**{key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()})
        for page, keys in content.items()
    }


def targets_by_hand() -> dict[str, str]:
    """Targets of the Makefile that CI does not make, with the reason."""
    reasons: dict[str, str] = yaml.safe_load(TABLE.read_text())["make"]
    return reasons


def targets_of(text: str) -> set[str]:
    """The targets that a page tells a reader to make, in blocks and in sentences."""
    return {block or span for block, span in TARGET.findall("\n".join([*blocks(text), prose(text)]))}


def commands_of(text: str) -> list[Command]:
    """The commands of a page: lines of its blocks, and those of its sentences that have more words."""
    lines = "\n".join(blocks(text)).splitlines()
    spans = [" ".join(span.split()) for span in SPAN.findall(prose(text))]
    commands = []
    for line in dict.fromkeys([*lines, *spans]):
        if match := LINE.match(line):
            module, *words = shlex.split(match["words"] or match["file"], comments=True)
            commands.append(Command(line.partition(" #")[0].strip(), module, tuple(words)))
    return commands


def documented() -> dict[str, list[Command]]:
    """The pages that tell a reader what to run, with their commands."""
    pages = {page: commands_of(text) for page, text in PAGES.items() if not page.startswith(RECORDS)}
    return {page: commands for page, commands in pages.items() if commands}


def filled(command: Command, page: Page) -> list[str]:
    """The words after the module, as they are run here."""
    words = [*command.words]
    for there, here in PLACES.items():
        words = [re.sub(rf"(^|=){re.escape(there)}", rf"\g<1>{here}", word) for word in words]
    before = BEFORE.get(command.module, "").split()
    more = (TINY.get(command.module), page.tiny.get(command.module), page.tiny.get(command.text))
    after = [word for some in more if some for word in some.split()]
    return [*before, *words, *after]
