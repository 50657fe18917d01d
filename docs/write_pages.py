"""Write the pages of the code anew: `python -m docs.write_pages`.

In: the keys (utils/config/keys.py) and the recipes (utils/config/recipes.py). Out: the page
docs/reference/configuration.md, and the table in docs/concepts/recipes.md; a test compares both.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from utils.config.keys import keys
from utils.config.recipes import RECIPES, Recipe
from utils.help_pages import Parser

DOCS = Path(__file__).resolve().parent
CONFIGURATION, OF_RECIPES = DOCS / "reference" / "configuration.md", DOCS / "concepts" / "recipes.md"

HEAD = """# Configuration

Every key, from [the schema](../../utils/config/schema.py); `python -m docs.write_pages` writes this page. A
file of [configs/](../../configs) holds some of them, and `section.key=value` on the command line changes one:

```
python -m pretraining.train --config configs/smoke_test.yaml train.max_steps=20 optim.base_lr=3e-4
```

* A typo, a wrong type and a rule between two keys that does not hold are errors of one line, exit code 2.
* In brackets: type, unit, default. Without a default it is null, or the file must hold the key. A dagger (†):
  a resumed run may have another value; any other change is refused.
* Triples are in the order D, H, W: B-scan, axial, A-scan. `${...}` is the value of another key.
* On the command line a key of text takes what is written (`run.dir="runs/x #2"`, `experiment_name=007`), and
  null where it may be null. `~` in front of a path is the home folder, here and in files. Numbers are
  decimal: 010 and 2:40 are errors.
"""
MEANINGS = {
    "hidden": "tokens that the context encoder must not see",
    "masks": "how targets may be drawn",
    "positions": "positions of tokens",
    "predictor": "predictor",
    "target": "what is predicted",
    "target_norm": "normalisation of the target",
    "loss": "loss per token",
    "ema": "momentum of the target encoder",
    "lr": "learning rate after the warm-up",
}

IMPLIED = ("*required*", "`null`")  # defaults that the page does not write
SHORT = {  # of a type, on the page
    "`true` or `false`": "`true`/`false`",
    ", 1 or more": " ≥1",
    ", 0 or more": " ≥0",
    ", a number in [0, 1]": " in [0,1]",
    ", a number above 0": " >0",
    "; or null": "/null",
    " or null": "/null",
    "one of ": "",
    "`, `": "`/`",
}


def configuration() -> str:
    """The page of the keys: a list for each section."""
    parts, section = [HEAD], None
    for key in keys().values():
        head = key.name.partition(".")[0] if "." in key.name else "top level"
        if head != section:
            section = head
            parts.append(f"\n## {head}\n\n")
        kind = key.type
        for words, short in SHORT.items():
            kind = kind.replace(words, short)
        kind += f"; {key.unit}" if key.unit else ""
        star = "†" if key.may_change else ""
        default = "" if key.default in IMPLIED else f"; {key.default}"
        parts.append(f"* `{key.name}`{star}: {key.meaning} ({kind}{default})\n")
    return "".join(parts)


def recipes() -> str:
    """The table of docs/concepts/recipes.md, one decision a line."""

    def cell(value: object) -> str:
        if isinstance(value, tuple):
            return " or ".join(value) or "all tokens"
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value).replace("_", " ")

    lines = [f"| | {' | '.join(f'`{name}`' for name in RECIPES)} |", "|---" * (len(RECIPES) + 1) + "|"]
    for field in fields(Recipe):
        values = (cell(getattr(recipe, field.name)) for recipe in RECIPES.values())
        lines.append(f"| {MEANINGS[field.name]} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write both."""
    parser = Parser(
        prog="python -m docs.write_pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    CONFIGURATION.write_text(configuration())
    text = OF_RECIPES.read_text()
    OF_RECIPES.write_text(re.sub(r"(?m)^\| \| `.*\n(\|.*\n)+", lambda _: recipes(), text, count=1))


if __name__ == "__main__":
    main()
