"""What an encoder tells of the phantom's truth: which layers lie in a token, and how thick they are.

    python -m benchmarks.phantom_truth --config configs/smoke_test.yaml --control runs/smoke_control

In: a checkpoint of pretraining.train (the one that finetuning.evaluate takes), another of the same
configuration after a few steps (--control: a file or a run's folder), the prepared store of a phantom and its
tree. Out: `${run.dir}/truth.json` and a printed table. Two questions, of many answers for each participant:
  occupancy  which share of a token each layer takes: from the token's features and its place
  thickness  each layer's mean thickness in a volume, less what is usual for its protocol: from mean and std
             of the volume's features
The protocol is that of benchmarks.evidence.scores: two readouts, ridge regression and one hidden layer,
fitted on some volumes of split train, penalty and step chosen on some of split val, R2 of the participants of
split test. Pre-training is compared with the weights that it began with, with the control, and with rows that
have no encoder (finetuning.features.yardsticks): only what is above the first two and the best of the others
was gained by training. Participants that either checkpoint saw are an error. Each answer is a look at split
test: a line of the store's ledger (finetuning.cohort.ledger).
"""

from __future__ import annotations

from functools import partial

from benchmarks.evidence.options import add_control
from utils.cli import answer_early, parse_cli, run_cli

if __name__ == "__main__":  # torch takes seconds to import
    answer_early("benchmarks.phantom_truth", __doc__ or "", partial(parse_cli, add_arguments=add_control))

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.evidence.cohorts import Truth
from benchmarks.evidence.scores import HIDDEN, Scores, score
from benchmarks.truth_tokens import (
    layer_occupancy,
    read_truth_file,
    sample_tokens,
    token_features,
    valid_tokens,
)
from data_setup.loader import start_early
from data_setup.manifest import select_wanted
from data_setup.store.reader import PreparedStore
from finetuning.answers.evaluation import find_checkpoint
from finetuning.answers.scorecard import Answer
from finetuning.cohort.cohort import EVALUATED, TRAIN, VAL, Cohort
from finetuning.cohort.ledger import digest, look_at
from finetuning.cohort.source import check_fit
from finetuning.cohort.source import find_checkpoint as find_in_run
from finetuning.features.kept import pretrained_encoder, random_encoder
from finetuning.features.slices import SliceEncoder, image_encoder_of
from finetuning.features.yardsticks import FoldFeatures, yardsticks
from models.probes import intervals
from models.probes.intervals import doubt, interval95, participant_draws, side
from pretraining.gauges.skill import evenly_spaced
from utils.checkpoint import load_checkpoint
from utils.config.load import config_of_yaml, flatten
from utils.config.schema import Config
from utils.errors import UserError
from utils.log import setup_logging
from utils.report.tables import truth_tables
from utils.runtime.open import open_runtime
from utils.runtime.single import Runtime
from utils.tables import terminal

FORMAT_VERSION = 4
# volumes of split train that are fitted on, and of split val: three encoders read them in half a minute
TRAIN_VOLUMES, VAL_VOLUMES = 96, 32
MIN_PARTICIPANTS = 2  # in each fold
PRETRAINED, RANDOM, CONTROL = "pretrained", "random_init", "control"
READOUTS = {"linear": "", "hidden": HIDDEN}  # and how the tasks of benchmarks.evidence.scores end
QUESTIONS = {"occupancy": "layer occupancy of a token", "thickness": "layer thickness of a volume"}
# the control is the same run but for its length and where it stands
SHARED = ("seed", "augment.", "spatial.", "model.size", "method.", "optim.", "train.global_batch_size")
log = logging.getLogger(__name__)


def choose_rows(cfg: Config, store: PreparedStore) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the store and their folds: all of split test, some of train and val, evenly over the store.

    Raises UserError for a store that is no phantom's, and for a fold of too few participants.
    """
    if not store.attrs["synthetic"]:
        raise UserError(
            f"{store.url}: expected the store of a phantom, whose truth is known, found real eyes"
        )
    index = store.index.loc[store.kept]
    index = select_wanted(cfg, index[index["listed"]])
    limits = {"train": TRAIN_VOLUMES, "val": VAL_VOLUMES, "test": len(index)}
    rows, folds = [], []
    for fold, (split, limit) in zip((TRAIN, VAL, EVALUATED), limits.items(), strict=True):
        part = index[index["split"] == split]
        people = part["person_id"].nunique()
        if people < MIN_PARTICIPANTS:
            raise UserError(
                f"{store.url}: split {split}: expected {MIN_PARTICIPANTS} participants or more, found "
                f"{people}"
            )
        rows.append(part.index.to_numpy()[evenly_spaced(len(part), limit).numpy()])
        folds.append(np.full(len(rows[-1]), fold))
    return np.concatenate(rows), np.concatenate(folds)


def read_truth(cfg: Config, store: PreparedStore) -> Truth:
    """The cohort with its truth from the phantom's tree; UserError names a truth file that is missing."""
    rows, fold = choose_rows(cfg, store)
    layers: tuple[str, ...] = ()
    thickness, tokens, occupancy = [], [], []
    for row in rows.tolist():
        record = store.index.loc[row]
        truth = read_truth_file(cfg.data.gcs_root, record, cfg.data.storage_options)
        layers = tuple(truth["layer_names"].tolist())
        chosen = sample_tokens(valid_tokens(record, cfg.spatial), row)
        shares_NL = layer_occupancy(truth, record, cfg.spatial)
        tokens.append(chosen)
        occupancy.append(np.where(chosen[:, None] >= 0, shares_NL[chosen], 0.0))
        thickness.append(truth["layer_thickness_um"])
    index = store.index.loc[rows]
    return Truth(
        rows=rows,
        person=index["person_id"].to_numpy(str),
        protocol=index["protocol"].to_numpy(str),
        label=np.zeros(len(rows), int),  # no class is asked for
        classes=(),
        thickness_um=np.array(thickness, np.float64),
        layers=layers,
        tokens=np.array(tokens),
        occupancy=np.array(occupancy, np.float32),
        fold=fold,
        is_split=True,
    )


def require_unseen(cohort: Truth, state: dict[str, Any], url: str) -> None:
    """Raise UserError if a checkpoint saw a participant who chooses a penalty or is scored."""
    shared = np.intersect1d(cohort.person[cohort.fold != TRAIN], state["participants"])
    if len(shared):
        raise UserError(
            f"{url}: expected no participant of split val or test in its pre-training, found "
            f"{len(shared)} ({', '.join(shared[:3])})"
        )


def require_control(state: dict[str, Any], url: str, control: dict[str, Any], control_url: str) -> None:
    """Raise UserError unless the control is an earlier step of the same configuration."""
    if control["step"] >= state["step"]:
        raise UserError(
            f"{control_url}: expected a control of fewer steps than {url}, which has {state['step']}, found "
            f"{control['step']}"
        )
    wanted, seen = (
        dict(one for one in flatten(config_of_yaml(part["config"], where)) if one[0].startswith(SHARED))
        for part, where in ((state, url), (control, control_url))
    )
    for key, value in wanted.items():
        if seen[key] != value:
            raise UserError(f"{control_url}: {key}: expected {value} as in {url}, found {seen[key]}")


def _fixed(features: np.ndarray) -> FoldFeatures:
    """The same in every fold."""
    return lambda _: features


def compare(
    name: str, scored: dict[str, Scores], draws_SP: np.ndarray, labels: dict[str, str]
) -> dict[str, Any]:
    """One question as truth.json holds it: a row for each arm, and pre-training less each of the others; the
    second readout is below `hidden`.

    `scored`: arm -> scores, PRETRAINED first; `draws_SP`: the same resamples of participants for all.
    `compared`: the arms that the verdict is about, for each readout; the last is the best row without an
    encoder, by its score on split test, which favours that row.
    """
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    compared, differences = {}, {}
    for readout, suffix in READOUTS.items():
        task = f"{name}{suffix}"
        arms = {arm: scores for arm, scores in scored.items() if task in scores.parts}
        rows[readout] = {arm: _row(scores, task, draws_SP) for arm, scores in arms.items()}
        differences[readout] = {
            arm: _difference(scored[PRETRAINED], scores, task, draws_SP)
            for arm, scores in arms.items()
            if arm != PRETRAINED
        }
        free = [arm for arm in arms if arm not in (PRETRAINED, RANDOM, CONTROL)]
        best = sorted(free, key=lambda arm: rows[readout][arm]["r2"])[-1:]
        compared[readout] = [RANDOM, CONTROL, *best]
    return {
        "name": name,
        "rows": [{"name": arm, **row, "hidden": rows["hidden"][arm]} for arm, row in rows["linear"].items()],
        "differences": differences["linear"],
        "hidden": {"differences": differences["hidden"]},
        "compared": compared,
        "verdict": verdict(name, differences, compared, labels),
    }


def _row(scores: Scores, task: str, draws_SP: np.ndarray) -> dict[str, Any]:
    """Of an arm by one readout."""
    return {
        "r2": scores.of(task),
        "ci95": list(interval95(scores.draws(task, draws_SP))),
        "val_r2": scores.val[task],
        "chosen_c": scores.chosen_c[task][0],
    }


def _difference(first: Scores, second: Scores, task: str, draws_SP: np.ndarray) -> dict[str, Any]:
    """First less second, its interval, and the doubt of models.probes.intervals."""
    gains_P = first.gains(task) - second.gains(task)
    ci95 = list(interval95(first.draws(task, draws_SP) - second.draws(task, draws_SP)))
    return {"mean": float(gains_P.sum()), "ci95": ci95, "doubt": doubt(ci95, first.people(task), gains_P)}


def verdict(
    name: str,
    differences: dict[str, dict[str, dict[str, Any]]],
    compared: dict[str, list[str]],
    labels: dict[str, str],
) -> str:
    """The sentences that the paired intervals allow, a readout each, whichever side they favour."""
    labels = labels | {RANDOM: "random initialisation", CONTROL: "the control"}
    words = {"linear": QUESTIONS[name].capitalize(), "hidden": "With one hidden layer"}
    sentences = []
    for readout, arms in compared.items():
        apart = {arm: differences[readout][arm] for arm in arms}
        better, worse, level = (
            [labels[arm] for arm, d in apart.items() if side(d["ci95"], d["doubt"]) == sign]
            for sign in (1, -1, 0)
        )
        texts = {"better than": better, "worse than": worse, "not shown to differ from": level}
        parts = [f"{text} {_and(names)}" for text, names in texts.items() if names]
        gained = "gained by training" if not (worse or level) else "no gain shown"
        sentences.append(f"{words[readout]}: {gained}. Pre-training is {', '.join(parts)}.")
        if doubts := sorted({d["doubt"] for d in apart.values()} - {""}):
            sentences.append(f"Cannot say, because {'; '.join(doubts)}.")
    return " ".join(sentences)


def _and(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def answer_of(cfg: Config, store: PreparedStore, cohort: Truth, checksums: Sequence[str]) -> Answer:
    """truth.json: it depends on checkpoints, volumes, folds, truth and keys of the protocol."""
    volumes = store.index.loc[cohort.rows, "checksum"].tolist()
    table = [volumes, cohort.fold.tolist(), cohort.person.tolist(), cohort.tokens.tolist()]
    truth = [hashlib.sha256(part.tobytes()).hexdigest() for part in (cohort.thickness_um, cohort.occupancy)]
    facts = [FORMAT_VERSION, list(checksums), _protocol(cfg), table, truth]
    return Answer(cfg.run.dir, "truth", digest(facts))


def _protocol(cfg: Config) -> list[Any]:
    blocks = cfg.model.feature_blocks
    return [cfg.seed, intervals.BOOTSTRAP_SAMPLES, cfg.train.use_bf16, *([blocks] if blocks else [])]


def _look(cfg: Config, store: PreparedStore, cohort: Truth, checksums: Sequence[str]) -> int:
    """Add a look at split test to the ledger; returns its number."""
    unit = cohort.rows.astype(str)
    asked = Cohort("truth", cohort.layers, cohort.rows, cohort.fold, cohort.thickness_um, unit, cohort.person)
    what = f"truth: {', '.join((PRETRAINED, RANDOM, CONTROL))}"
    return look_at(store, [asked], " ".join(checksums), [FORMAT_VERSION, *_protocol(cfg)], what)


def measure(
    cfg: Config, control_place: str, runtime: Runtime, image: SliceEncoder | None = None
) -> dict[str, Any]:
    """The content of truth.json; an existing file of the same checkpoints and volumes is reused."""
    start_early(cfg.data)
    options = cfg.data.storage_options
    url, control_url = find_checkpoint(cfg), find_in_run(control_place, options)
    state, control = (load_checkpoint(place, options) for place in (url, control_url))
    store = PreparedStore.open(cfg.data.store, options, cfg.data.cache_dir)
    require_control(state, url, control, control_url)
    cohort = read_truth(cfg, store)
    for part, place in ((state, url), (control, control_url)):
        check_fit(cfg, store, part, place)
        require_unseen(cohort, part, place)
    checksums = [state["checksum"], control["checksum"], *([image.digest()] if image else [])]
    answer = answer_of(cfg, store, cohort, checksums)
    if (known := answer.known()) is not None:
        return known

    is_evaluated = cohort.fold == EVALUATED
    people = len(np.unique(cohort.person[is_evaluated]))
    draws = participant_draws(people, intervals.BOOTSTRAP_SAMPLES, cfg.seed)
    encoders = {
        PRETRAINED: pretrained_encoder(cfg, state, url),
        RANDOM: random_encoder(cfg, cfg.seed),
        CONTROL: pretrained_encoder(cfg, control, control_url),
    }
    look = _look(cfg, store, cohort, checksums)
    began = "" if state.get("imported_from") else ", where it began"
    labels = {
        PRETRAINED: "pre-trained encoder (EMA target)",
        RANDOM: f"random initialisation (seed {cfg.seed}{began})",
        CONTROL: f"the same run after {control['step']} steps (control)",
    }
    scored: dict[str, Scores] = {}
    for name, encoder in encoders.items():
        log.info("%s: features of %d volumes", name, len(cohort.rows))
        pooled, dense, _ = token_features(encoder, cfg, store, cohort.rows, cohort.tokens, runtime)
        scored[name] = score(cohort, _fixed(pooled), _fixed(dense), cfg.grid)
    for row in yardsticks(cfg, store, cohort.rows, runtime, cohort.tokens, image):
        log.info("%s: features of %d volumes", row.label, len(cohort.rows))
        labels[row.name] = row.label
        scored[row.name] = score(cohort, row.volumes, row.tokens, cfg.grid)
    result = {
        "format_version": FORMAT_VERSION,
        "checkpoint": url,
        "checkpoint_sha256": state["checksum"],
        "step": state["step"],
        "control": control_url,
        "control_sha256": control["checksum"],
        "control_step": control["step"],
        "labels": labels,
        "look": look,
        "n_participants": people,
        "n_volumes": int(is_evaluated.sum()),
        "n_tokens": int((cohort.tokens[is_evaluated] >= 0).sum()),
        "n_volumes_train": int((cohort.fold == TRAIN).sum()),
        "n_volumes_val": int((cohort.fold == VAL).sum()),
        "layers": list(cohort.layers),
        "questions": [compare(question, scored, draws, labels) for question in QUESTIONS],
    }
    return answer.write(result)


def format_table(result: dict[str, Any]) -> str:
    """The tables for a terminal, the verdicts last."""
    head = f"{result['n_participants']} participants of split test, look {result['look']} at them"
    tables = [terminal(replace(table, note="")) for table in truth_tables(result)]
    return "\n".join([head, *tables, *(question["verdict"] for question in result["questions"])])


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the checkpoint of a configuration with its control and print the tables."""
    cfg, args = parse_cli("benchmarks.phantom_truth", __doc__ or "", argv, add_control)
    setup_logging()
    runtime = open_runtime(cfg.train.use_bf16)
    print(format_table(measure(cfg, args.control, runtime, image_encoder_of(args))))


if __name__ == "__main__":
    run_cli(main)
