"""What `python -m finetuning.explain` does: score the maps of a head where the truth is known.

In: a head of classes, the store and tree of a phantom with thinned eyes. Out: explanations.json beside the
head, which finetuning.predict reads; explanations.md and explanations.png in run.dir.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_setup.store.reader import PreparedStore
from finetuning.cohort import Cohort, read_cohort
from finetuning.explanations.arms import build_arms
from finetuning.explanations.eyes import Eyes, find_eyes
from finetuning.explanations.measure import measure
from finetuning.explanations.picture import draw_eyes
from finetuning.explanations.table import judge, markdown
from finetuning.head_evaluation import count_seen, evaluated_config
from finetuning.head_file import Head, open_head
from finetuning.ledger import data_digest, record_look
from finetuning.prediction.evidence import methods_of
from finetuning.prediction.judgement import file_beside, score_text
from utils import storage
from utils.config.load import storage_options_of
from utils.errors import EXIT_FINISHED, UserError
from utils.indices import evenly_spaced
from utils.log import setup_logging
from utils.provenance import provenance
from utils.runtime.open import open_runtime

FORMAT_VERSION = 1
DRAWN_EYES, DPI = 3, 90


def explain(wanted: str, num_eyes: int, quick: bool, overrides: Sequence[str]) -> int:
    """Write the files and print the table. Raises UserError."""
    setup_logging()
    prefix = "model.checkpoint="  # the same encoder in another place; open_head compares checksums
    places = [word.removeprefix(prefix) for word in overrides if word.startswith(prefix)]
    head = open_head(wanted, storage_options_of(overrides), places[-1] if places else None)
    cfg = evaluated_config(head.cfg, head.url, overrides)
    head = replace(head, cfg=cfg)
    runtime = open_runtime(cfg.train.use_bf16)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    cohort = _cohort(head, store)
    eyes = find_eyes(cfg, store, cohort, num_eyes)
    arms = build_arms(head, store, cohort, runtime)
    methods = methods_of(head.state["head_kind"])[: 1 if quick else 2]
    measured = measure(cfg, store, arms, methods, eyes, cohort.num_outputs, runtime)
    content = {
        "format_version": FORMAT_VERSION,
        "head_sha256": head.checksum,
        "encoder_sha256": head.state["encoder"]["checksum"],
        "commit": provenance(runtime)["commit"],
        "head_kind": head.state["head_kind"],
        "store": storage.absolute(store.url),
        "split": cfg.eval.split,
        "layer": planted_layer(cfg.data.gcs_root, cfg.data.storage_options),
        "target": cohort.names[eyes.target],
        "n_others": len(eyes.others),
        "num_without": eyes.num_without,
        "look": _look(head, store, cohort, methods),
        **judge(measured, eyes.person, cfg.probe.bootstrap_samples, cfg.seed),
    }
    options, table = cfg.data.storage_options, markdown(content)
    storage.write_text(storage.join(cfg.run.dir, "explanations.md"), table)
    volumes = {number: store.read(int(eyes.rows[number])) for number in _drawn(eyes)}
    picture = io.BytesIO()
    figure = draw_eyes(measured, eyes.truth, volumes, cfg.grid, cfg.spatial.patch_size)
    figure.savefig(picture, dpi=DPI, format="png")
    storage.write_bytes(storage.join(cfg.run.dir, "explanations.png"), picture.getvalue())
    url = file_beside(head.url)  # last: a prediction believes it
    storage.write_text(url, json.dumps(content, indent=1, allow_nan=False) + "\n", options)
    print(table)
    print(f"{url}: {score_text(content['method'], content['score'])}")
    return EXIT_FINISHED


def _cohort(head: Head, store: PreparedStore) -> Cohort:
    """Labels and folds; raises UserError for other classes, or for people that were seen."""
    cohort = read_cohort(head.cfg, store)
    if cohort.names != head.names:
        raise UserError(f"{head.url}: expected the labels {list(head.names)}, found {list(cohort.names)}")
    count_seen(head, head.cfg, cohort)
    return cohort


def _look(head: Head, store: PreparedStore, cohort: Cohort, methods: Sequence[str]) -> int | None:
    """Count this look at test participants in the store's ledger, with those of finetuning.evaluate; None
    where there is none.
    """
    cfg = head.cfg
    if cfg.eval.split != "test":
        return None
    what = f"explain: {', '.join(methods)} of the {head.state['head_kind']} head"
    protocol = hashlib.sha256(json.dumps(["explain", methods, cfg.eval.split]).encode()).hexdigest()
    digest = data_digest(store, cohort)
    return record_look(store.url, head.checksum, digest, protocol, what, cfg.data.storage_options)


def planted_layer(tree: str, options: Any) -> str:
    """The layer that a phantom's tree names in synthetic.json; raises UserError where it names none."""
    url = storage.join(tree, "synthetic.json")
    marker = json.loads(storage.read_text(url, options)) if storage.exists(url, options) else {}
    if "thin" not in marker:
        raise UserError(f"{url}: expected a phantom of data_setup.phantom --thin, found none")
    return str(marker["thin"])


def _drawn(eyes: Eyes) -> list[int]:
    """Numbers of the eyes in the picture, evenly over all."""
    return [int(number) for number in np.asarray(evenly_spaced(len(eyes.rows), DRAWN_EYES))]
