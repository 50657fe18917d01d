"""What finetuning.explain found of a head's maps, and which one a prediction shows.

In: a head. Out: a `Judgement`, read from explanations.json beside the head's file. A score belongs to one
head and to the eyes that it was measured on: the file names the head by its checksum, and another head's says
nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from finetuning.head_file import Head
from finetuning.prediction.evidence import methods_of
from utils import storage
from utils.config.schema import StorageOptions
from utils.errors import UserError

FILE = "explanations.json"
NOT_JUDGED = "not judged: run finetuning.explain"


@dataclass(frozen=True)
class Judgement:
    """The map of a head that is shown, and what is known of it."""

    method: str
    text: str  # for people: its score, or that there is none
    score: dict[str, Any] | None = None  # auprc, ci95, chance, n_eyes, beats_chance

    @property
    def is_validated(self) -> bool:
        """Whether the map was better than chance where the truth is known."""
        return self.score is not None and bool(self.score["beats_chance"])


def file_beside(head_url: str) -> str:
    """Where the scores of a head's maps lie."""
    return storage.join(head_url.rpartition("/")[0] or ".", FILE)


def judgement_of(head: Head, options: StorageOptions) -> Judgement:
    """What is known of a head's maps. Raises UserError for a file that finetuning.explain did not write."""
    first = methods_of(head.state["head_kind"])[0]
    url = file_beside(head.url)
    if not storage.exists(url, options):
        return Judgement(first, NOT_JUDGED)
    try:
        content = json.loads(storage.read_text(url, options))
        checksum, method, score = content["head_sha256"], content["method"], content["score"]
        text = score_text(method, score)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{url}: expected what finetuning.explain writes, found another file ({error})"
        ) from error
    if checksum != head.checksum:
        return Judgement(first, f"{NOT_JUDGED} ({FILE} beside the head is of another head)")
    return Judgement(method, text, score)


def score_text(method: str, score: dict[str, Any]) -> str:
    """A score in one line."""
    low, high = score["ci95"]
    verdict = "better than chance" if score["beats_chance"] else "not shown to be better than chance"
    return (
        f"{method}: AUPRC {score['auprc']:.3f} ({low:.3f} to {high:.3f}) on {score['n_eyes']} synthetic eyes "
        f"with a planted change, chance {score['chance']:.3f}: {verdict}"
    )
