"""docs/reference/configuration.md: every key of the schema with its type, unit, default and meaning.

In: the keys (utils/config/keys.py). Out: the page, which `python -m utils.config.page` prints; a test
compares it with the schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from utils.config.keys import keys
from utils.help_pages import PeopleParser

HEAD = """# Configuration

Every key, from [the schema](../../utils/config/schema.py); `python -m utils.config.page` prints this page. A
file of [configs/](../../configs) holds some of them, and `section.key=value` on the command line changes one:

```
python -m pretraining.train --config configs/smoke_test.yaml train.max_steps=20 optim.base_lr=3e-4
```

* A typo, a wrong type and a rule between two keys that does not hold are errors of one line, exit code 2.
* *required*: the file must hold it. *resume*: a run that goes on may have another value; any other change is
  refused.
* Triples are in the order D, H, W: B-scan, axial, A-scan. `${...}` is the value of another key.
"""
TABLE = "| key | type | unit | default | resume | meaning |\n|---|---|---|---|---|---|\n"


def markdown() -> str:
    """The page: a table for each section."""
    parts, section = [HEAD], None
    for key in keys().values():
        head = key.name.partition(".")[0] if "." in key.name else "top level"
        if head != section:
            section = head
            parts.append(f"\n## {head}\n\n{TABLE}")
        cells = [
            f"`{key.name}`",
            key.type,
            key.unit,
            key.default,
            "yes" if key.may_change else "",
            key.meaning,
        ]
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page, or what it is for."""
    PeopleParser("utils.config.page", __doc__ or "").parse_args(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    main()
