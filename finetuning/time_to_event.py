"""Time to an event: a ridge Cox regression on frozen features, `task.kind=survival` of finetuning.evaluate.

In: a checkpoint, the store, a table with task.time_column (a duration, more than 0) and task.event_column (1:
the event was seen then; 0: nothing was seen until then). Out: `${run.dir}/survival.json`, survival.md and a
printed table: Harrell's C and the mean cumulative dynamic AUC of the pre-trained encoder, random
initialisation, the device, and permuted outcomes (chance); the paired difference with its sentence.

Pooled features are standardised on the training fold and averaged over the volumes of a unit. The penalty has
the highest C on validation units (ties: the larger) of those that can be fitted. Fit and metrics are those of
scikit-survival (extra `survival`): CoxPHSurvivalAnalysis (Efron's ties), concordance_index_censored,
cumulative_dynamic_auc (censoring weighted by the training fold). Intervals resample evaluated participants.
"""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler

from data_setup.store.reader import PreparedStore
from finetuning.cohort import EVALUATED, TRAIN, VAL, Cohort, count_overlap, read_cohort
from finetuning.evaluation import Asked
from finetuning.pooled import check_fit, device_features, embed_rows, pretrained_encoder, random_encoder
from finetuning.probing import permuted
from models.probes.intervals import interval95, participant_draws, verdict
from models.probes.participants import mean_by_participant
from utils import storage
from utils.checkpoint import load_checkpoint
from utils.config.schema import Config
from utils.errors import UserError
from utils.runtime.single import Runtime

FORMAT_VERSION = 1
PENALTIES = tuple(10.0**e for e in range(-3, 5))
MIN_EVENTS = 5  # in each fold
QUANTILES = (0.25, 0.5, 0.75)  # of the evaluated events' times: where the dynamic AUC is taken
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcomes:
    """Units of one fold, sorted by unit."""

    person: np.ndarray  # str [U]
    time: np.ndarray  # [U]
    event: np.ndarray  # bool [U]
    features: np.ndarray  # [U, F], means over the volumes of the unit

    def known(self) -> np.ndarray:
        """Events and times as scikit-survival takes them."""
        from sksurv.util import Surv

        return np.asarray(Surv.from_arrays(self.event, self.time))


def require_library() -> None:
    """Raise UserError without scikit-survival."""
    if find_spec("sksurv") is None:
        raise UserError(
            "task.kind=survival: expected the package scikit-survival, found none; pip install "
            "scikit-survival"
        )


def outcomes(cohort: Cohort, fold: int, features_nF: np.ndarray) -> Outcomes:
    """The units of a fold with the mean features of their volumes."""
    chosen = cohort.fold == fold
    first = np.unique(cohort.unit[chosen], return_index=True)[1]
    target = cohort.target[chosen][first]
    values = mean_by_participant(cohort.unit[chosen], features_nF[chosen].astype(np.float64))
    return Outcomes(cohort.person[chosen][first], target[:, 0], target[:, 1] > 0, values)


def fit_cox(train: Outcomes, val: Outcomes, test: Outcomes) -> tuple[np.ndarray, float, float]:
    """(log risk of the test units [U], the penalty, C on val) of a ridge Cox regression.

    Raises UserError where no penalty can be fitted.
    """
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    # all directions that the training fold varies in: the ridge solution has no other, and they are few
    turn = PCA(min(train.features.shape[1], len(train.time) - 1), svd_solver="full").fit(train.features)
    x, on_val, on_test = (turn.transform(part.features) for part in (train, val, test))
    best: tuple[float, float, np.ndarray] | None = None
    for penalty in sorted(PENALTIES, reverse=True):
        try:
            with warnings.catch_warnings():
                # a small penalty, many directions: Newton's steps overflow, the fit says so or has no end
                warnings.simplefilter("ignore", RuntimeWarning)
                warnings.simplefilter("error", ConvergenceWarning)
                model = CoxPHSurvivalAnalysis(alpha=penalty, ties="efron").fit(x, train.known())
        except (ValueError, ConvergenceWarning) as error:
            log.info("penalty %g is left out: %s", penalty, error)
            continue
        score = concordance(val, model.predict(on_val))
        if best is None or score > best[0]:
            best = score, penalty, model.predict(on_test)
    if best is None:
        raise UserError(
            f"task.kind=survival: expected a Cox regression that can be fitted with a penalty of "
            f"{min(PENALTIES):g} to {max(PENALTIES):g}, found none"
        )
    return best[2], best[1], best[0]


def concordance(part: Outcomes, risk_U: np.ndarray, at: np.ndarray | None = None) -> float:
    """Harrell's C; `at`: of these units, which may repeat. NaN where no pair can be compared."""
    from sksurv.exceptions import NoComparablePairException
    from sksurv.metrics import concordance_index_censored

    at = np.arange(len(risk_U)) if at is None else at
    if not part.event[at].any():
        return float("nan")
    try:
        with np.errstate(invalid="ignore"):  # 0 / 0 where all times are the same
            return float(concordance_index_censored(part.event[at], part.time[at], risk_U[at])[0])
    except NoComparablePairException:
        return float("nan")


def dynamic_auc(train: Outcomes, test: Outcomes, risk_U: np.ndarray) -> dict[str, Any]:
    """Mean cumulative dynamic AUC over times at quantiles of the evaluated events; times past the follow-up
    of either fold are left out, and None stands where none remains.
    """
    from sksurv.metrics import cumulative_dynamic_auc

    inside = test.time < train.time.max()  # where the weights of censoring exist
    times = np.unique(np.quantile(test.time[test.event], QUANTILES))
    times = times[
        (times > test.time[inside].min(initial=np.inf)) & (times < test.time[inside].max(initial=0))
    ]
    if not len(times) or not test.event[inside].any():
        return {"times": [], "auc": [], "mean": None}
    auc, mean = cumulative_dynamic_auc(train.known(), test.known()[inside], risk_U[inside], times)
    return {"times": times.tolist(), "auc": np.asarray(auc).tolist(), "mean": float(mean)}


def concordance_draws(part: Outcomes, risks: list[np.ndarray], draws_SP: np.ndarray) -> np.ndarray:
    """Harrell's C [S, arms] of every resample of participants, the same for all arms; NaN where a resample
    has no pair to compare.
    """
    _, number = np.unique(part.person, return_inverse=True)
    units = np.arange(len(number))
    result = np.empty((len(draws_SP), len(risks)))
    for sample, draw_P in enumerate(draws_SP):
        at = np.repeat(units, draw_P[number])
        result[sample] = [concordance(part, risk_U, at) for risk_U in risks]
    return result


def evaluate_survival(cfg: Config, url: str, runtime: Runtime) -> dict[str, Any]:
    """The content of survival.json. Raises UserError as evaluate does, and for a fold of too few events."""
    require_library()
    state = load_checkpoint(url, cfg.data.storage_options)
    store = PreparedStore.open(cfg.data.store, cfg.data.storage_options, cfg.data.cache_dir)
    check_fit(cfg, store, state, url)
    cohort = read_cohort(cfg, store)
    overlap = count_overlap(cfg, cohort, state["participants"], url)
    _require_events(cfg, cohort, store.url)
    rows = np.unique(cohort.rows)
    place = np.searchsorted(rows, cohort.rows)
    encoders = {
        "pretrained": ("pre-trained encoder (EMA target)", pretrained_encoder(cfg, state, url)),
        "random_init": (f"random initialisation (seed {cfg.seed})", random_encoder(cfg, cfg.seed)),
    }
    arms = {
        name: (label, cohort, embed_rows(encoder, cfg, store, rows, runtime)[place])
        for name, (label, encoder) in encoders.items()
    }
    known = cohort.rows[cohort.fold == TRAIN]
    arms["device"] = ("device one-hot", cohort, device_features(store, cohort.rows, known))
    shuffled = permuted(cohort, cfg.seed)
    arms["permuted"] = ("pre-trained, outcomes permuted (chance)", shuffled, arms["pretrained"][2])
    look = Asked(cfg, store, (cohort,), overlap, state["checksum"]).look(f"survival: {', '.join(arms)}")
    result = _table(cfg, arms) | {"look": look, "overlap": overlap}
    result |= {"format_version": FORMAT_VERSION, "url": url, "sha256": state["checksum"]}
    content = json.dumps(result, indent=1, allow_nan=False) + "\n"
    storage.write_text(storage.join(cfg.run.dir, "survival.json"), content)
    storage.write_text(storage.join(cfg.run.dir, "survival.md"), markdown(result) + "\n")
    return result


def _require_events(cfg: Config, cohort: Cohort, where: str) -> None:
    """Raise UserError for a fold with few events, or no two times to compare: nothing can be learnt."""
    for fold, split in ((TRAIN, "train"), (VAL, "val"), (EVALUATED, cfg.eval.split)):
        part = outcomes(cohort, fold, np.zeros((len(cohort.rows), 1)))
        events = int(part.event.sum())
        if events < MIN_EVENTS:
            raise UserError(
                f"{where}: split {split}: expected {MIN_EVENTS} events of {cfg.task.event_column} or more, "
                f"found {events}"
            )
        if np.isnan(concordance(part, np.zeros(len(part.time)))):
            raise UserError(
                f"{where}: split {split}: expected an event of {cfg.task.event_column} before another unit's "
                f"{cfg.task.time_column}, found none"
            )


def _table(cfg: Config, arms: dict[str, tuple[str, Cohort, np.ndarray]]) -> dict[str, Any]:
    """Fit every arm; rows with intervals, and the difference between the first two."""
    rows: list[dict[str, Any]] = []
    risks: list[np.ndarray] = []
    last: Outcomes | None = None
    for name, (label, cohort, features) in arms.items():
        scaler = StandardScaler().fit(features[cohort.fold == TRAIN].astype(np.float64))
        standard = scaler.transform(features.astype(np.float64))
        train, val, test = (outcomes(cohort, fold, standard) for fold in (TRAIN, VAL, EVALUATED))
        risk, penalty, on_val = fit_cox(train, val, test)
        risks.append(risk)
        last = test
        rows.append(
            {"name": name, "label": label, "c_index": concordance(test, risk), "penalty": penalty}
            | {"val_c_index": on_val, "auc": dynamic_auc(train, test, risk)}
        )
        log.info("%s: C %.3f, penalty %g", label, rows[-1]["c_index"], penalty)
    assert last is not None
    people = len(np.unique(last.person))
    draws = concordance_draws(last, risks, participant_draws(people, cfg.probe.bootstrap_samples, cfg.seed))
    draws = draws[np.isfinite(draws).all(axis=1)]
    for row, values in zip(rows, draws.T, strict=True):
        row["ci95"] = list(interval95(values))
    mean = rows[0]["c_index"] - rows[1]["c_index"]
    ci95 = interval95(draws[:, 0] - draws[:, 1])
    return {
        "time_column": cfg.task.time_column,
        "event_column": cfg.task.event_column,
        "unit": cfg.task.unit,
        "split": cfg.eval.split,
        "n_participants": people,
        "n_units": len(last.time),
        "n_events": int(last.event.sum()),
        "rows": rows,
        "difference": {"mean": mean, "ci95": list(ci95)},
        "verdict": verdict(mean, ci95, metric="Harrell's C"),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table, the verdict last."""
    looks = (
        "validation, not counted as a look; the penalty was chosen on it"
        if result["look"] is None
        else f"look {result['look']}"
    )
    lines = [
        f"# {result['event_column']} by {result['time_column']}",
        "",
        f"{result['n_events']} events in {result['n_units']} units of {result['n_participants']} "
        f"participants of split {result['split']}; {looks}.",
        "",
        "| features | Harrell's C | 95 % interval | mean dynamic AUC | C on val | penalty |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        auc = "-" if row["auc"]["mean"] is None else f"{row['auc']['mean']:.3f}"
        low, high = row["ci95"]
        lines.append(
            f"| {row['label']} | {row['c_index']:.3f} | {low:.3f} to {high:.3f} | {auc} | "
            f"{row['val_c_index']:.3f} | {row['penalty']:g} |"
        )
    if result["overlap"]:
        lines += ["", f"OVERLAP: pre-training saw {result['overlap']} of these participants."]
    return "\n".join([*lines, "", result["verdict"]])
