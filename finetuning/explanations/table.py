"""What the scores of maps allow to say: rows with intervals, the winner, the verdict, a Markdown table.

In: `Measured`. Out: the content of explanations.json. A mean is over participants, each the mean of its eyes;
intervals resample participants, and differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from finetuning.explanations.arms import LABELS, RANDOM_ENCODER, RANDOM_HEAD, TRAINED
from finetuning.explanations.measure import BRIGHTNESS, PLACE, RANDOM_ORDER, Measured, control_order
from models.probes.intervals import interval95, participant_draws

PLAIN = {BRIGHTNESS: "no head: grey value of the token", PLACE: "no head: where other eyes have the change"}
CONTROLS = (RANDOM_HEAD, RANDOM_ENCODER)
DELETION = (
    "Deletion: what the head's output loses while the first 2 to 20 % of the tokens are hidden, in its "
    "standard deviations over all eyes."
)


def mean_over_people(values_n: np.ndarray, person_n: np.ndarray) -> np.ndarray:
    """The mean of each participant's eyes [P], in the order of their sorted ids."""
    _, number = np.unique(person_n, return_inverse=True)
    return np.bincount(number, values_n) / np.bincount(number)


def estimate(values_n: np.ndarray, person_n: np.ndarray, draws_SP: np.ndarray) -> dict[str, Any]:
    """Mean over participants and its bootstrap interval."""
    of_people = mean_over_people(values_n, person_n)
    resampled = draws_SP @ of_people / len(of_people)
    return {"mean": float(of_people.mean()), "ci95": list(interval95(resampled))}


def judge(measured: Measured, person_n: np.ndarray, samples: int, seed: int) -> dict[str, Any]:
    """Rows, deletion, the map that is shown (`method`), its `score`, and the `verdict` in words."""
    draws = participant_draws(len(np.unique(person_n)), samples, seed)

    def of(values: np.ndarray) -> dict[str, Any]:
        return estimate(values, person_n, draws)

    rows = []
    for (arm, method), auprc in measured.auprc.items():
        row: dict[str, Any] = {"arm": arm, "method": method, "auprc": of(auprc)}
        row["above_chance"] = of(auprc - measured.chance)
        if arm == TRAINED:
            others = {name: measured.auprc[name, method] for name in CONTROLS}
            others[PLACE] = measured.auprc[PLACE, ""]
            row["above"] = {name: of(auprc - other) for name, other in others.items()}
            row["beats_chance"] = is_above(row["above_chance"]) and all(
                is_above(row["above"][name]) for name in CONTROLS
            )
        rows.append(row)
    best = winner(rows)
    return {
        "method": best["method"],
        "score": {
            "auprc": best["auprc"]["mean"],
            "ci95": best["auprc"]["ci95"],
            "chance": of(measured.chance)["mean"],
            "n_eyes": len(person_n),
            "n_participants": len(np.unique(person_n)),
            "beats_chance": best["beats_chance"],
        },
        "rows": rows,
        "deletion": [
            {
                "order": name,
                "loss": of(loss),
                "above_random": of(loss - measured.deletion[RANDOM_ORDER]),
                "above_control": of(loss - measured.deletion[control_order(name)])
                if control_order(name) in measured.deletion
                else None,
            }
            for name, loss in measured.deletion.items()
        ],
        "auroc": dict(measured.auroc),
        "verdict": verdict(best),
    }


def is_above(difference: Mapping[str, Any]) -> bool:
    """Whether an interval lies above zero."""
    return difference["ci95"][0] > 0


def winner(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of the head's maps that beat chance; where none does, the first: that of one forward pass."""
    own = [row for row in rows if row["arm"] == TRAINED]
    better = [row for row in own if row["beats_chance"]]
    return max(better, key=lambda row: row["auprc"]["mean"]) if better else own[0]


def verdict(best: dict[str, Any]) -> str:
    """The sentence that the intervals allow."""
    if not best["beats_chance"]:
        return (
            "No map beats chance: none is above the share of planted tokens and above both controls of "
            f"random weights. Predictions show {best['method']} and say so."
        )
    low, high = best["above"][PLACE]["ci95"]
    place = "above" if low > 0 else "below" if high < 0 else "not shown to differ from"
    return (
        f"{best['method'].capitalize()} beats chance and both controls of random weights; predictions "
        f"show it. It is {place} a map of where changes usually are."
    )


def markdown(content: Mapping[str, Any]) -> str:
    """The tables of explanations.md."""
    score = content["score"]
    lines = [
        f"# Maps of a {content['head_kind']} head, scored on a planted change",
        "",
        f"{score['n_eyes']} eyes of {score['n_participants']} participants of split {content['split']}, "
        f"layer {content['layer']}, class {content['target']!r} explained. {content['num_without']} planted "
        "eyes whose change the grid does not hold are left out. Intervals: 95 %, over participants.",
        "",
        f"**{content['verdict']}**",
        "",
        *([f"This is look {content['look']} at these test participants.", ""] if content["look"] else []),
        f"| AUPRC, chance {score['chance']:.3f} | map | mean | 95 % interval | above chance | above |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        above = "; ".join(f"{name} {_signed(row['above'][name])}" for name in row.get("above", {}))
        names = LABELS.get(row["arm"]) or PLAIN[row["arm"]], row["method"] or "the same for any head"
        numbers = f"{row['auprc']['mean']:.3f}", _interval(row["auprc"]), _signed(row["above_chance"])
        lines.append(f"| {' | '.join([*names, *numbers, above])} |")
    if content["deletion"]:
        lines += [
            "",
            DELETION,
            "",
            "| order | mean loss | 95 % interval | above a random order | above its map of random weights |",
            "|---|---|---|---|---|",
        ]
    for row in content["deletion"]:
        loss, control = row["loss"], row["above_control"]
        numbers = f"{loss['mean']:.2f}", _interval(loss, 2), _signed(row["above_random"], 2)
        against_own = "-" if control is None else _signed(control, 2)
        lines.append(f"| {' | '.join([row['order'], *numbers, against_own])} |")
    aurocs = ", ".join(f"{LABELS[arm]} {value:.2f}" for arm, value in content["auroc"].items())
    lines += ["", f"Planted eyes against {content['n_others']} others, AUROC: {aurocs or 'no others'}.", ""]
    return "\n".join(lines)


def _interval(value: Mapping[str, Any], digits: int = 3) -> str:
    low, high = value["ci95"]
    return f"{low:.{digits}f} to {high:.{digits}f}"


def _signed(value: Mapping[str, Any], digits: int = 3) -> str:
    low, high = value["ci95"]
    return f"{value['mean']:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
