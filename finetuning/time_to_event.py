"""Time to an event: a ridge Cox regression on frozen features, `task.kind=survival` of finetuning.evaluate.

In: a checkpoint, the store, a table with task.time_column (a duration, more than 0) and task.event_column (1:
the event was seen then; 0: nothing was seen until then). Out: `${run.dir}/survival.json`, survival.md and a
printed table: Harrell's C, the mean cumulative dynamic AUC and the integrated Brier score of the pre-trained
encoder, random initialisation, the device, and permuted outcomes (chance); the Brier score of one
Kaplan-Meier curve for everybody; the paired difference with its sentence.

Pooled features are standardised on the training fold and averaged over the volumes of a unit. The penalty has
the highest C on validation units (ties: the larger) of those that can be fitted. Fit and metrics are those of
scikit-survival (extra `survival`): CoxPHSurvivalAnalysis (Efron's ties), concordance_index_censored,
cumulative_dynamic_auc and integrated_brier_score (censoring weighted by the training fold; curves by
Breslow's estimator). Intervals resample evaluated participants.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
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

FORMAT_VERSION = 2
PENALTIES = tuple(10.0**e for e in range(-3, 5))
MIN_EVENTS = 5  # in each fold
# of the evaluated events' times
QUANTILES = (0.25, 0.5, 0.75)  # where the dynamic AUC is taken
BRIER_QUANTILES = tuple(n / 20 for n in range(2, 19))  # over which the Brier score is integrated
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


@dataclass(frozen=True)
class CoxFit:
    """A ridge Cox regression, and what it predicts of the test units."""

    risk: np.ndarray  # log risk [U]
    penalty: float
    val_score: float  # C on val
    curves: Callable[[np.ndarray], np.ndarray]  # times [T] -> probability of no event until then [U, T]


def fit_cox(train: Outcomes, val: Outcomes, test: Outcomes) -> CoxFit:
    """The regression whose penalty has the highest C on val.

    Raises UserError where no penalty can be fitted.
    """
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    # all directions that the training fold varies in: the ridge solution has no other, and they are few
    turn = PCA(min(train.features.shape[1], len(train.time) - 1), svd_solver="full").fit(train.features)
    x, on_val, on_test = (turn.transform(part.features) for part in (train, val, test))
    best: tuple[float, float, CoxPHSurvivalAnalysis] | None = None
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
            best = score, penalty, model
    if best is None:
        raise UserError(
            f"task.kind=survival: expected a Cox regression that can be fitted with a penalty of "
            f"{min(PENALTIES):g} to {max(PENALTIES):g}, found none"
        )
    score, penalty, chosen = best

    def curves(times_T: np.ndarray) -> np.ndarray:
        return np.stack([curve(times_T) for curve in chosen.predict_survival_function(on_test)])

    return CoxFit(chosen.predict(on_test), penalty, score, curves)


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


def inner_times(train: Outcomes, test: Outcomes, quantiles: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Which test units can be scored, bool [U], and at which times: quantiles of the test events' times,
    without those past the follow-up of either fold. No time where no unit with an event remains.
    """
    inside = test.time < train.time.max()  # where the weights of censoring exist
    times = np.unique(np.quantile(test.time[test.event], quantiles))
    low, high = test.time[inside].min(initial=np.inf), test.time[inside].max(initial=0)
    times = times[(times > low) & (times < high)]
    return inside, times if test.event[inside].any() else times[:0]


def dynamic_auc(train: Outcomes, test: Outcomes, risk_U: np.ndarray) -> dict[str, Any]:
    """Mean cumulative dynamic AUC at QUANTILES; None where no time remains."""
    from sksurv.metrics import cumulative_dynamic_auc

    inside, times = inner_times(train, test, QUANTILES)
    if not len(times):
        return {"times": [], "auc": [], "mean": None}
    auc, mean = cumulative_dynamic_auc(train.known(), test.known()[inside], risk_U[inside], times)
    return {"times": times.tolist(), "auc": np.asarray(auc).tolist(), "mean": float(mean)}


def brier(
    train: Outcomes, test: Outcomes, curves: Callable[[np.ndarray], np.ndarray] | None = None
) -> float | None:
    """Integrated Brier score over BRIER_QUANTILES, 0 is best; without `curves` that of the training fold's
    Kaplan-Meier curve for everybody. None where fewer than two times remain.
    """
    from sksurv.functions import StepFunction
    from sksurv.metrics import integrated_brier_score
    from sksurv.nonparametric import kaplan_meier_estimator

    inside, times = inner_times(train, test, BRIER_QUANTILES)
    if len(times) < 2:
        return None
    if curves is None:
        steps = kaplan_meier_estimator(train.event, train.time)
        curve = StepFunction(*(np.append(first, part) for first, part in zip((0.0, 1.0), steps, strict=True)))
        survival_UT = np.tile(curve(times), (len(inside), 1))
    else:
        survival_UT = curves(times)
    return float(integrated_brier_score(train.known(), test.known()[inside], survival_UT[inside], times))


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
        fit = fit_cox(train, val, test)
        risks.append(fit.risk)
        last = test
        rows.append(
            {"name": name, "label": label, "c_index": concordance(test, fit.risk), "penalty": fit.penalty}
            | {"val_c_index": fit.val_score, "auc": dynamic_auc(train, test, fit.risk)}
            | {"brier": brier(train, test, fit.curves)}
        )
        log.info("%s: C %.3f, penalty %g", label, rows[-1]["c_index"], fit.penalty)
    assert last is not None
    people = len(np.unique(last.person))
    draws = concordance_draws(last, risks, participant_draws(people, cfg.probe.bootstrap_samples, cfg.seed))
    draws = draws[np.isfinite(draws).all(axis=1)]
    for row, values in zip(rows, draws.T, strict=True):
        row["ci95"] = list(interval95(values))
    mean = rows[0]["c_index"] - rows[1]["c_index"]
    ci95 = interval95(draws[:, 0] - draws[:, 1])
    whole = arms["pretrained"][1]
    no_features = np.zeros((len(whole.rows), 1))
    return {
        "time_column": cfg.task.time_column,
        "event_column": cfg.task.event_column,
        "unit": cfg.task.unit,
        "split": cfg.eval.split,
        "n_participants": people,
        "n_units": len(last.time),
        "n_events": int(last.event.sum()),
        "rows": rows,
        "brier_of_one_curve": brier(
            outcomes(whole, TRAIN, no_features), outcomes(whole, EVALUATED, no_features)
        ),
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
        "| features | Harrell's C | 95 % interval | mean dynamic AUC | Brier | C on val | penalty |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        auc, error = _number(row["auc"]["mean"]), _number(row["brier"])
        low, high = row["ci95"]
        lines.append(
            f"| {row['label']} | {row['c_index']:.3f} | {low:.3f} to {high:.3f} | {auc} | {error} | "
            f"{row['val_c_index']:.3f} | {row['penalty']:g} |"
        )
    one_curve = _number(result["brier_of_one_curve"])
    lines += ["", f"Brier, integrated over time: 0 is best; one Kaplan-Meier curve for all has {one_curve}."]
    if result["overlap"]:
        lines += ["", f"OVERLAP: pre-training saw {result['overlap']} of these participants."]
    return "\n".join([*lines, "", result["verdict"]])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
