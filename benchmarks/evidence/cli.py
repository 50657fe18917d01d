"""Evidence: recipes, random initialisation and ablations under one probe protocol.

    python -m benchmarks.evidence data [--real-eyes DIR]  cohorts, stores and truth, once
    python -m benchmarks.evidence calibrate               seconds per step of every arm, on a quiet machine
    python -m benchmarks.evidence run --budget 300 --minutes 60
    python -m benchmarks.evidence confirm                 the same runs, scored on people that chose nothing
    python -m benchmarks.evidence device --only ARM,ARM   is the scanner in the features, and at what cost out
    python -m benchmarks.evidence table                   results.md and table.json of the runs
    python -m benchmarks.evidence search --only ARM,ARM   sequential halving, then new seeds and people
    python -m benchmarks.evidence compute --budgets 37.5,150,600   do the differences grow with compute?
    python -m benchmarks.evidence real --data FOLDER      the same on real eyes with layer masks: real.py

Everything lives below --root. Every command resumes, and Ctrl-C is safe.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.evidence.arms import (
    CONFIG,
    CONTROL,
    CONTROLS,
    MISMATCHED,
    PENALTY_ONLY,
    RANDOM,
    REFERENCE,
    SUPERVISED,
    TRAINED,
    arm_by_name,
    arm_config,
    run_dir,
)
from benchmarks.evidence.calibration import calibrate, steps_of_budget, timed_as
from benchmarks.evidence.cohorts import (
    EVALUATION_SEED,
    PEOPLE,
    PRETRAINING_SEED,
    make_data,
    make_people,
    read_truth,
)
from benchmarks.evidence.compute import compute
from benchmarks.evidence.device import device_report
from benchmarks.evidence.differences import training_facts
from benchmarks.evidence.page import split_page, write_results
from benchmarks.evidence.patches import PATCHES
from benchmarks.evidence.queue import BASELINES, Plan, Queue, confirmation_jobs, run_all
from benchmarks.evidence.real import make_real_data, refuse_real
from benchmarks.evidence.scores import (
    TASKS,
    baseline_features,
    encoder_features,
    real_eyes,
    save_scores,
    score,
)
from benchmarks.evidence.search import search
from benchmarks.evidence.supervised import supervised_encoder
from data_setup.store.reader import PreparedStore
from finetuning.features.pooled import pretrained_encoder, random_encoder
from pretraining.train import train
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.errors import UserError
from utils.help_pages import Parser


def score_one(root: Path, name: str, seed: int, people: Path) -> None:
    """Score one run of `root`, one random initialisation, the ceiling, or all baselines on the cohort below
    `people`; writes scores.json into its folder there.
    """
    torch.set_num_threads(1)
    plan = Plan.load(root)
    truth, store = read_truth(people), PreparedStore.open(str(people / "evaluation_store"))
    reference = arm_config(arm_by_name(REFERENCE), 0, plan.steps[REFERENCE], root, plan.extra)
    if name == BASELINES:
        for baseline, features in baseline_features(reference, store, truth).items():
            scores = score(truth, *features, reference.grid)
            save_scores(people / BASELINES / baseline, scores, {"name": baseline})
        return
    arm = arm_by_name(name)
    steps = plan.steps[name] if arm.is_trained else 0
    cfg = arm_config(arm, seed, max(steps, 1), root, plan.extra)
    folder, out = run_dir(root, arm, seed), run_dir(people, arm, seed)
    if arm.is_trained:
        url = storage.join(str(folder), "checkpoints", f"step_{steps:08d}.pt")
        encoder = pretrained_encoder(cfg, load_checkpoint(url), url)
    elif name == SUPERVISED:
        encoder = supervised_encoder(reference, root, seed, plan.steps[REFERENCE])
    else:
        encoder = random_encoder(cfg, seed)
    pooled, dense, rank = encoder_features(encoder, cfg, store, truth, reference.grid)
    scores = score(truth, lambda _: pooled, lambda _: dense, reference.grid)
    facts = {
        "name": name,
        "seed": seed,
        "rankme": rank,
        "real_rankme": real_eyes(encoder, cfg, people, out, f"{arm.label}, seed {seed}"),
        **(training_facts(folder, cfg) if arm.is_trained else {}),
    }
    save_scores(out, scores, facts)


def train_one(root: Path, name: str, seed: int) -> int:
    """Train one run of the plan, with its arm's patch; returns the exit code of pretraining.train."""
    plan, arm = Plan.load(root), arm_by_name(name)
    if arm.patch is not None:
        PATCHES[arm.patch]()
    return train(arm_config(arm, seed, plan.steps[name], root, plan.extra))


def run(root: Path, args: argparse.Namespace) -> None:
    """Train and score all runs that are not done yet."""
    if args.steps is None:
        budget, steps = args.budget, steps_of_budget(root, args.budget, trained_of(args.only))
    else:
        budget, steps = None, {arm.name: arm.steps or args.steps for arm in TRAINED}
    plan = Plan(root, budget, args.seeds, steps, tuple(args.change))
    run_all(plan, args.jobs, args.minutes, None if args.only is None else args.only.split(","))


def trained_of(only: str | None) -> list[str] | None:
    """The arms that a run with `--only` trains: these, the reference and its controls; None: all."""
    if only is None:
        return None
    asked = [name for name in only.split(",") if name != SUPERVISED]
    return list(dict.fromkeys([REFERENCE, *(name for name in CONTROLS if name != RANDOM), *asked]))


def real(root: Path, args: argparse.Namespace) -> None:
    """All of it on real eyes: data, calibration, runs, scores and the page."""
    out = root / "real.md" if args.out is None else args.out
    split_page(out)
    root.mkdir(parents=True, exist_ok=True)
    cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, args.change)
    make_real_data(root, args.data, cfg, CONFIG, args.change)
    if args.steps is None:
        names = trained_of(args.only)
        timed = None if names is None else list(dict.fromkeys(timed_as(name) for name in names))
        calibrate(root, args.jobs, args.change, timed)
    run(root, args)
    print(write_results(root, out))


def confirm(root: Path, args: argparse.Namespace) -> None:
    """Score every run again, on people that had no part in training or in choosing."""
    plan = Plan.load(root)
    people = root / f"{PEOPLE}{args.people_seed}_{args.count}"
    queue, waiting = Queue(plan, args.jobs), confirmation_jobs(plan, people)
    cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, plan.extra)
    make_people(people, cfg, CONFIG, plan.extra, args.count, args.people_seed)
    queue.run(waiting)


def halve(root: Path, args: argparse.Namespace) -> None:
    """Sequential halving and its confirmation."""
    names = args.only.split(","), [name for name in args.beside.split(",") if name]
    people = args.count, args.people_seed
    print(
        search(root, *names, args.budgets, args.seeds, args.keep, args.jobs, args.task, people, args.change)
    )


def by_budget(root: Path, args: argparse.Namespace) -> None:
    """The same arms at several budgets."""
    names = args.only.split(",")
    print(compute(root, names, args.budgets, args.seeds, args.jobs, args.change))


def seconds_of_rounds(text: str) -> list[float]:
    """'150,600' as numbers, for argparse; every round costs more than the one before."""
    values = [float(part) for part in text.split(",")]
    if values[0] <= 0 or values != sorted(set(values)) or not math.isfinite(values[-1]):
        raise argparse.ArgumentTypeError(f"expected seconds that grow, such as 150,600, found {text}")
    return values


def refuse_mistakes(args: argparse.Namespace) -> None:
    """Raise UserError for the first argument that makes no sense."""
    given = vars(args)
    least_of = {"jobs": 1, "seeds": 1, "steps": 2, "pretraining": 1, "evaluation": 1, "count": 1}
    for name, least in least_of.items():
        value = given.get(name)
        if value is not None and value < least:
            raise UserError(f"--{name}: expected {least} or more, found {value}")
    if given.get("people_seed") in (PRETRAINING_SEED, EVALUATION_SEED):
        raise UserError(
            f"--people-seed: expected people that no run knows, found {args.people_seed}, a seed of `data`"
        )
    if "budget" in given and not 0 < args.budget < math.inf:
        raise UserError(f"--budget: expected a number above 0, found {args.budget:g}")
    if "keep" in given and not 0 < args.keep < 1:
        raise UserError(f"--keep: expected a share between 0 and 1, found {args.keep:g}")
    if "minutes" in given and not args.minutes >= 0:
        raise UserError(f"--minutes: expected a number from 0 on, found {args.minutes:g}")
    names = [RANDOM] * (args.command == "device") + [arm.name for arm in TRAINED]
    for flag in ("only", "beside"):
        asked = set(filter(None, (given.get(flag) or "").split(",")))
        if args.command == "run":
            asked -= {SUPERVISED}
        if unknown := asked - set(names):
            raise UserError(
                f"--{flag}: expected some of {', '.join(names)}, found {', '.join(sorted(unknown))}"
            )
    eyes = given.get("real_eyes")
    if eyes is not None and not (eyes / "retinal_oct" / "manifest.tsv").is_file():
        raise UserError(
            "--real-eyes: expected an AI-READI folder (participants.tsv, retinal_oct/manifest.tsv and the "
            f"DICOM files that it names), found no retinal_oct/manifest.tsv in {eyes}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    parser = Parser(
        prog="python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    names = (
        "data",
        "real",
        "calibrate",
        "run",
        "train",
        "score",
        "confirm",
        "search",
        "compute",
        "device",
        "table",
    )
    verbs = {name: commands.add_parser(name) for name in names}
    for name, command in verbs.items():
        place = Path("runs/evidence_real" if name == "real" else "runs/evidence")
        command.add_argument("--root", type=Path, default=place, help="where all of it lives")
        if name in ("real", "calibrate", "run", "confirm", "search", "compute"):
            command.add_argument("--jobs", type=int, default=2, help="runs at a time, each on its own core")
        if name in ("real", "run"):
            command.add_argument(
                "--budget", type=float, default=300.0, help="seconds of training per arm and seed"
            )
            command.add_argument("--steps", type=int, help="the same steps for every arm instead of a budget")
            command.add_argument("--seeds", type=int, default=3)
            command.add_argument(
                "--minutes", type=float, default=60.0, help="of wall-clock for the ablations"
            )
            only = "these recipes and ablations alone, beside the controls; supervised: the ceiling"
            command.add_argument("--only", metavar="ARM,ARM", help=only)
        if name in ("data", "real", "calibrate", "run", "search", "compute"):
            command.add_argument("--change", action="append", default=[], metavar="section.key=value")
    verbs["data"].add_argument("--pretraining", type=int, default=240, help="participants to train on")
    verbs["data"].add_argument("--evaluation", type=int, default=200, help="other participants to score on")
    verbs["data"].add_argument("--real-eyes", type=Path, metavar="DIR", help="AI-READI folder of real scans")
    verbs["real"].add_argument("--data", type=Path, required=True, help="folder of eyes: see real.py")
    verbs["real"].add_argument("--out", type=Path, help="the page; by default real.md below --root")
    verbs["search"].add_argument("--only", metavar="ARM,ARM", required=True, help="the arms of the race")
    verbs["search"].add_argument(
        "--beside", metavar="ARM,ARM", default="mae_plain", help="trained and reported, in no race"
    )
    verbs["search"].add_argument(
        "--budgets", type=seconds_of_rounds, default="150,600,2400", help="seconds of training, by round"
    )
    verbs["search"].add_argument("--seeds", type=int, default=3, help="of all rounds but the first")
    verbs["search"].add_argument(
        "--keep", type=float, default=0.5, help="share of a round's arms that goes on, rounded up"
    )
    verbs["search"].add_argument("--task", choices=TASKS, default="occupancy", help="what decides")
    verbs["compute"].add_argument(
        "--only",
        metavar="ARM,ARM",
        default=",".join((REFERENCE, MISMATCHED, PENALTY_ONLY, "mae_plain")),
        help="the first is compared with all others",
    )
    verbs["compute"].add_argument(
        "--budgets", type=seconds_of_rounds, default="37.5,150,600", help="seconds of training"
    )
    verbs["compute"].add_argument("--seeds", type=int, default=3)
    verbs["device"].add_argument("--only", metavar="ARM,ARM", default=",".join((RANDOM, CONTROL, REFERENCE)))
    verbs["device"].add_argument("--seeds", type=int, default=3)
    verbs["device"].add_argument("--out", type=Path, help="device.json below --root by default")
    for name in ("train", "score"):
        verbs[name].add_argument("--arm", required=True)
        verbs[name].add_argument("--seed", type=int, required=True)
    verbs["score"].add_argument(
        "--people", type=Path, help="folder of `confirm`; without it, those of `data`"
    )
    for name in ("confirm", "search"):
        verbs[name].add_argument("--count", type=int, default=200, help="people to score on")
        verbs[name].add_argument("--people-seed", type=int, default=1003, help="of the phantom")
    verbs["table"].add_argument("--out", type=Path, help="results.md below --root by default")
    args = parser.parse_args(argv)
    refuse_mistakes(args)
    root = args.root.resolve()
    if args.command in ("data", "confirm", "search"):
        refuse_real(root, args.command)
    if args.command == "data":
        root.mkdir(parents=True, exist_ok=True)
        cfg = arm_config(arm_by_name(REFERENCE), 0, 1, root, args.change)
        make_data(root, cfg, CONFIG, args.change, (args.pretraining, args.evaluation), args.real_eyes)
    elif args.command == "calibrate":
        print(json.dumps(calibrate(root, args.jobs, args.change), indent=1))
    elif args.command in ("real", "run", "confirm", "search", "compute"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs as Ctrl-C does
        try:
            verb = {"real": real, "run": run, "confirm": confirm, "search": halve, "compute": by_budget}
            verb[args.command](root, args)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", flush=True)
            return 130
    elif args.command == "device":
        print(device_report(root, args.only.split(","), args.seeds, args.out or root / "device.json"))
    elif args.command == "train":
        return train_one(root, args.arm, args.seed)
    elif args.command == "score":
        score_one(root, args.arm, args.seed, root if args.people is None else args.people.resolve())
    else:
        print(write_results(root, args.out or root / "results.md"))
    return 0
