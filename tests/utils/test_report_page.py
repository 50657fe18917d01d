"""The page of a report: its verdict on a run, several runs, the slice viewer's data; tables elsewhere."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretraining.gauges.alarms import Alarms
from pretraining.gauges.skill import MIN_HALF
from pretraining.gauges.validation import quarters
from tests.support.report_factory import evaluation_json, own_part, write_run
from utils.report.cli import main
from utils.report.health import (
    COLLAPSING,
    DIVERGED,
    EARLY,
    HEALTHY,
    LEAKING,
    NEVER,
    SKILL_PEOPLE,
    STALLED,
    Health,
    health,
)
from utils.report.page import MAX_POINTS, charts_of
from utils.report.pictures import load_snapshot
from utils.report.run_files import read_run
from utils.report.tables import data_tables, evaluation_table, quality_tables
from utils.report.volumes import LayersPicture, load_layers, save_layers, volume_of_layers, volume_of_snapshot
from utils.tables import Table, bracketed, estimate, interval, markdown, number, page, terminal, two_cells

# --- the verdict on a run ---

History = list[dict[str, float | None]]


def judge(history: History) -> Health:
    """What a run of these lines, ten steps apart, is called; the alarms are those of training."""
    alarms, series, not_finite = Alarms(), {}, {}
    raised: list[tuple[int, str]] = []
    for step, line in zip(itertools.count(10, 10), history, strict=False):
        raised += [(alarm.step, alarm.text) for alarm in alarms.update(step, line)]
        for key, value in (line | alarms.states()).items():
            if value is None or not math.isfinite(value):
                if value is not None:
                    not_finite.setdefault(key, step)
            else:
                series.setdefault(key, []).append((step, value))
    return health(series, raised, not_finite)


def training(skill: np.ndarray, rank: np.ndarray | float = 90.0, loss: np.ndarray | float = 0.5) -> History:
    """Lines with these values of skill, rank and loss, and a little noise."""
    noise = np.random.default_rng(0).normal(0, 0.002, len(skill))
    columns = np.broadcast_arrays(skill, rank, loss, noise)
    return [
        {
            "train/loss": float(lo + n),
            "train/update_ratio": 1e-3,
            "train/bad_steps": 0,
            "train/rankme": float(r),
            "val/rankme": float(r),
            "train/feature_std": 0.8,
            "val/skill_position": float(s + n),
        }
        for s, r, lo, n in zip(*columns, strict=True)
    ]


RISING, LEVEL = np.linspace(-0.1, 0.4, 12), np.full(12, -0.03)


def with_last(count: int, **values: float | list[float]) -> History:
    """A run that rises, of which the last lines have these values; of a list each line its own."""
    history = training(RISING)
    for place, line in enumerate(history[-count:]):
        line |= {key: value[place] if isinstance(value, list) else value for key, value in values.items()}
    return history


OVER = np.array([100, 100, 5, 5, 5, 5, 90, 90, 90, 90, 90, 90.0])
SCORES = [0.25, 0.3, 0.4, 0.45, 0.5, 0.5]
HISTORIES = {
    "rises": (
        training(RISING, rank=np.linspace(60, 110, 12)),
        HEALTHY, "val/skill_position rises and ends at 0.4", "val/rankme went from 60 to 110.",
    ),
    "learned, and levelled off": (training(np.full(12, 0.3)), HEALTHY),
    "collapsing, whatever its skill and loss do": (
        training(RISING, rank=np.geomspace(100, 3, 12), loss=np.linspace(0.8, 0.1, 12)),
        COLLAPSING, "Alarms began at step",
    ),
    "a collapse that is over": (training(RISING, rank=OVER), HEALTHY, "none holds at the end"),
    "a falling loss is no learning": (
        training(LEVEL, loss=np.linspace(0.8, 0.3, 12)), STALLED, "not above 0",
    ),
    "falls": (training(-RISING), STALLED),
    "weights that stand still": (with_last(1, **{"train/update_ratio": 1e-12}), STALLED),
    "updates that are skipped": (
        with_last(4, **{"train/bad_steps": [0, 1, 2, 3]}), STALLED, "3 were not finite",
    ),
    "a leak, with a good skill": (with_last(1, **{"val/leak": 0.2}), LEAKING),
    "a loss that is no number at the end": (
        with_last(3, **{"train/loss": math.nan}), DIVERGED, "from step 100 on",
    ),
    "a skipped update that is over": (
        with_last(3, **{"train/loss": [math.nan, math.nan, 0.4]}), HEALTHY,
    ),
    "few lines": (training(RISING)[:2], EARLY),
    "no line": ([], EARLY),
    "rises, below 0": (training(np.linspace(-0.9, -0.2, 12)), EARLY),
    "a fine-tuning's score rises": ([{"val/balanced_accuracy": score} for score in SCORES], HEALTHY),
    "a fine-tuning's score is level": ([{"val/balanced_accuracy": 0.25} for _ in SCORES], STALLED),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_run_is_called(name: str) -> None:
    history, word, *texts = HISTORIES[name]
    verdict = judge(history)
    assert verdict.word == word
    assert all(text in verdict.text for text in texts), verdict.text


def test_a_validation_without_skill_is_not_too_early_for_ever() -> None:
    """Few volumes never give one; before step 1 they are few in every run."""
    few = [line | {"val/skill_position": None, "val/volumes": 3.0} for line in training(RISING)]
    verdict = judge(few)
    assert verdict.word == NEVER
    assert "3 volumes measures no skill" in verdict.text
    assert f"{2 * MIN_HALF} volumes of 4 participants or more are needed" in verdict.text
    assert max(quarters(["a", "b", "c", "d"])) == SKILL_PEOPLE - 1
    assert health({"val/volumes": [(0, 3.0)]}, [], {}).word == EARLY
    assert judge([line | {"val/volumes": 90.0} for line in training(RISING)[:2]]).word == EARLY


def test_skill_of_training_is_no_verdict_where_validation_has_few_points() -> None:
    history = training(RISING)
    for line in history[2:]:  # a moving estimate, which reads too high while the target moves
        line["train/skill_position"] = line.pop("val/skill_position")
    verdict = judge(history)
    assert verdict.word == EARLY
    assert "2 of the 4 values" in verdict.text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; of the second, learning rate, a key, the commit and the data differ."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = write_run(folder / "first"), write_run(folder / "second")
    (first / "config.yaml").write_text("seed: 0\noptim:\n  base_lr: 0.001\n  clip: 1.0\n")
    (second / "config.yaml").write_text("seed: 0\noptim:\n  base_lr: 0.003\n  clip: 1.0\nonly: here\n")
    (second / "provenance.json").write_text(json.dumps({"commit": "def"}))
    prepared = json.loads((second / "prepare_report.json").read_text())
    prepared |= {"synthetic": False}
    (second / "prepare_report.json").write_text(json.dumps(prepared))
    picture = layers_picture()
    save_layers(str(second / "layers" / "row_000003.npz"), picture)
    (second / "evaluation.json").write_text(json.dumps(evaluation_json(0.02, 0.1)))
    (second / "leaderboard").mkdir()
    (second / "leaderboard" / "leaderboard.csv").write_text(
        "row,cell,value,low,high,val,seeds,train_participants,look\n"
        "mine,linear,0.61234,0.5,0.7,0.6,1,10,1\n"
        "raw voxels,linear,0.4,,,0.6,1,10,1\n"
        "mine,low-shot 5,,,,0.6,1,10,1\n"
    )
    return [first, second]


def layers_picture() -> LayersPicture:
    """Two surfaces 10 and 40.25 voxels below the top, the second unknown in the last A-scan."""
    predicted = np.stack([np.full((6, 32), 10.0), np.full((6, 32), 40.25)]).astype(np.float32)
    predicted[1, :, -1] = np.nan
    volume = np.random.default_rng(0).integers(0, 255, (6, 48, 32), np.uint8)
    return LayersPicture(volume, (0.5, 0.01, 0.1), ("ILM", "BM"), predicted, predicted + 1, "row 3")


def content_of(page: Path) -> dict:
    return json.loads(page.read_text().partition('id="content">')[2].partition("</script>")[0])


# --- several runs ---


def test_several_runs_share_a_page(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    main([str(path) for path in runs])
    page = runs[0] / "comparison.html"
    assert capsys.readouterr().out.splitlines()[0].split() == ["report", str(page)]
    assert all((path / "results.json").exists() for path in runs)
    content = content_of(page)
    assert content["runs"] == ["first", "second"]
    curves = {chart["title"]: [c["run"] for c in chart["curves"]] for chart in content["charts"]}
    assert curves["RankMe"] == [0, 1]
    text = own_part(page)
    start = text.index("keys differ")
    differing = text[start : text.index("</table>", start)]
    for key, values in {"optim.base_lr": ("0.001", "0.003"), "only": ("not there", "here")}.items():
        row = differing[differing.index(f"<td>{key}</td>") :].partition("</tr>")[0]
        assert all(f">{value}</td>" in row for value in values)
    assert "commit" in differing
    assert "seed" not in differing
    assert "optim.clip" not in differing


def test_what_one_run_took_from_participants_is_written_on_top(runs: list[Path]) -> None:
    main([str(path) for path in runs])
    text = own_part(runs[0] / "comparison.html")
    assert text.index("Participants' scans.") < text.index("<h1>")
    main([str(runs[0])])
    assert "Participants' scans." not in own_part(runs[0] / "report.html")


def test_tables_of_the_evaluation(runs: list[Path]) -> None:
    main([str(runs[1])])
    text = own_part(runs[1] / "report.html")
    board = text[text.index("<h3>leaderboard</h3>") :].partition("</table>")[0]
    assert "0.612 (0.500 to 0.700)" in board
    assert "<td>raw voxels</td><td" in board
    assert ">0.400</td>" in board
    assert "A difference of 0.100 could have been shown" in text


def test_two_runs_of_one_name_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "first")
    main([str(runs[0]), str(tmp_path / "first")])
    assert content_of(runs[0] / "comparison.html")["runs"] == [str(runs[0]), str(tmp_path / "first")]


def test_a_long_curve_is_thinned_and_keeps_its_ends(runs: list[Path]) -> None:
    run = read_run(runs[0])
    run.series["train/loss"] = [(step, step / 7) for step in range(10 * MAX_POINTS + 7)]
    (curve,) = (c for c in charts_of([run])[0]["curves"] if c["name"] == "train/loss")
    assert len(curve["x"]) <= MAX_POINTS + 1
    assert (curve["x"][0], curve["x"][-1]) == (0, 10 * MAX_POINTS + 6)
    assert curve["y"][-1] == pytest.approx((10 * MAX_POINTS + 6) / 7, rel=1e-5)


# --- what the slice viewer draws ---


def test_the_sheet_holds_every_bscan(runs: list[Path]) -> None:
    path = sorted((runs[0] / "snapshots").glob("*.npz"))[0]
    snapshot, volume = load_snapshot(path), volume_of_snapshot(path, "first")
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(volume["sheet"].partition(",")[2]))))
    height, width = volume["tile"]
    for plane in range(volume["shape"][0]):
        row, column = divmod(plane, volume["columns"])
        tile = sheet[row * height : (row + 1) * height, column * width : (column + 1) * width]
        error = np.abs(tile.astype(int) - snapshot.volume[plane])
        others = np.abs(tile.astype(int) - snapshot.volume[(plane + 5) % len(snapshot.volume)])
        assert error.mean() < others.mean() / 2
    masks = np.frombuffer(base64.b64decode(volume["masks"]), np.uint8)
    outside = snapshot.valid == 0
    assert (masks[outside] == 0).all()
    assert set(masks[snapshot.context][~outside[snapshot.context]]) == {1}
    assert set(masks[snapshot.target][~outside[snapshot.target]]) == {2}


def test_large_volumes_are_drawn_smaller(tmp_path: Path) -> None:
    picture = layers_picture()
    large = LayersPicture(
        np.zeros((6, 1200, 1200), np.uint8), picture.spacing, (), np.zeros((0, 6, 1200)),
        np.zeros((0, 6, 1200)), "",
    )  # fmt: skip
    save_layers(str(tmp_path / "a.npz"), large)
    volume = volume_of_layers(tmp_path / "a.npz", "run")
    height, width = volume["tile"]
    assert height == width < 1100
    assert Image.open(io.BytesIO(base64.b64decode(volume["sheet"].partition(",")[2]))).size == (
        volume["columns"] * width,
        -(-6 // volume["columns"]) * height,
    )


def test_surfaces_survive_the_file_and_the_page(tmp_path: Path) -> None:
    picture = layers_picture()
    save_layers(str(tmp_path / "layers" / "a.npz"), picture)
    read = load_layers(tmp_path / "layers" / "a.npz")
    np.testing.assert_array_equal(read.predicted, picture.predicted)
    assert (read.names, read.spacing, read.title) == (picture.names, picture.spacing, picture.title)
    ilm, bm = volume_of_layers(tmp_path / "layers" / "a.npz", "run")["surfaces"]
    codes = np.frombuffer(base64.b64decode(bm["predicted"]), "<u2").reshape(6, 32)
    assert set(codes[:, :-1].ravel().tolist()) == {40 * 16 + 4}
    assert set(codes[:, -1].tolist()) == {65535}
    assert (ilm["name"], bm["name"]) == ("ILM", "BM")
    with pytest.raises(ValueError, match=r"truth: expected heights \(2, 6, 32\)"):
        save_layers(str(tmp_path / "b.npz"), LayersPicture(**(vars(picture) | {"truth": picture.truth[:1]})))
    assert not (tmp_path / "b.npz").exists()


def test_the_quality_of_the_scans_stands_with_the_data(runs: list[Path]) -> None:
    run = read_run(runs[0])
    assert quality_tables(run.prepared) == []  # a store of before it was measured
    part = {"measured": 3, "median": 0.91, "lowest_tenth": 0.4, "signal_db": 20.5, "worst": {"signal_db": 3}}
    run.prepared["quality"] = part
    run.prepared["by_device"]["zeiss_cirrus"] |= {"quality": part | {"median": 0.72}}
    run.prepared["by_device"]["not_measured"] = run.prepared["by_device"]["zeiss_cirrus"] | {"quality": None}
    [table] = quality_tables(run.prepared)
    assert [row[:3] for row in table.rows] == [["all", "3", "0.91"], ["zeiss_cirrus", "3", "0.72"]]
    assert table in data_tables(run.prepared)


def test_a_metric_of_another_version_is_called_by_its_name() -> None:
    text = json.dumps(evaluation_json(0.02, 0.1)).replace("balanced_accuracy", "c_index")
    assert evaluation_table(json.loads(text)).header[1] == "c_index"


# --- tables elsewhere ---

SEEN = {"value": 0.5, "ci95": [0.4, 0.6123]}
NOTHING = {"value": None, "ci95": None}


def test_cells_say_what_does_not_exist() -> None:
    assert (number(2.0), number(7, "d"), number(None)) == ("2.000", "7", "-")
    assert (interval([-1, 1], "+.1f"), interval(None)) == ("-1.0 to +1.0", "-")
    assert [estimate(entry) for entry in (SEEN, NOTHING, None)] == ["0.500 (0.400 to 0.612)", "-", "-"]
    assert estimate(SEEN | {"ci95": None}) == "0.500"
    assert (two_cells(SEEN, ".1f"), two_cells(NOTHING)) == (["0.5", "0.4 to 0.6"], ["-", "-"])
    assert bracketed(0.1, [0, 0.25], "+.2f") == "+0.10 [+0.00, +0.25]"


def test_one_table_in_markdown_and_on_a_terminal() -> None:
    table = Table("Rows", ["row", "score"], [["a|b", "0.5"], ["c", "12.25"]], "A note.")
    assert markdown(table).splitlines() == [
        "## Rows", "", "A note.", "", "| row | score |", "| --- | ---: |", "| a\\|b | 0.5 |", "| c | 12.25 |",
    ]  # fmt: skip
    assert terminal(table).splitlines() == ["Rows", "row  score", "a|b    0.5", "c    12.25", "A note."]
    text = page("Title", ["Verdict."], ["one", "two"], [table])
    assert text.startswith("# Title\n\nVerdict.\n\n- one\n- two\n\n## Rows\n")
    assert "## " not in page("Title", [], [], [Table("", ["a"], [])])
