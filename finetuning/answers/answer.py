"""One answer in a run's folder: STEM.json with its numbers and STEM.md with its tables.

In: all that an answer depends on, as a fingerprint. Out: what the folder holds, if it answers the same
question: then nobody looks at the evaluated participants again. Else the two files, the JSON last, so that
where it is the other files of the answer are. An estimate in it is {value, ci95}; null does not exist.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils import storage
from utils.config.load import flatten, keys_of_features
from utils.config.schema import Config

Content = dict[str, Any]  # of STEM.json
Estimate = dict[str, Any]  # {value, ci95}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Where an answer lies, and to which question."""

    folder: str
    stem: str  # of its files
    fingerprint: str  # of all that it depends on

    def known(self) -> Content | None:
        """What the folder holds, where it answers the same question."""
        url = storage.join(self.folder, f"{self.stem}.json")
        if not storage.exists(url):
            return None
        content = json.loads(storage.read_text(url))
        if content.get("fingerprint") != self.fingerprint:
            return None
        log.info("%s already answers this question: reused", url)
        return content

    def write(self, content: Content, page: str | None = None) -> Content:
        """Write both files, the page first; returns the content with its fingerprint."""
        content = content | {"fingerprint": self.fingerprint}
        if page is not None:
            storage.write_text(storage.join(self.folder, f"{self.stem}.md"), page)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        storage.write_text(storage.join(self.folder, f"{self.stem}.json"), text)
        return content


def protocol_of(cfg: Config) -> dict[str, Any]:
    """The keys that decide how something is judged."""
    sections, keys = (
        ("task.", "probe.", "eval."),
        {*keys_of_features(dict(flatten(cfg))), "seed", "train.use_bf16"},
    )
    return {key: value for key, value in flatten(cfg) if key.startswith(sections) or key in keys}


def estimated(value: float, ci95: Sequence[float] | None) -> Estimate:
    """A number with its interval as plain values; NaN does not exist."""
    if math.isnan(value):
        return {"value": None, "ci95": None}
    return {"value": float(value), "ci95": None if ci95 is None else [float(end) for end in ci95]}


def looks(content: Content) -> list[str]:
    """What every page says of its look at the participants."""
    seen, look = content["overlap"], content["look"]
    lines = [f"**{seen} evaluated participants were seen in training.**"] if seen else []
    return [*lines, *([] if look is None else [f"This is look {look} at these test participants."])]
