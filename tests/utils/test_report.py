"""The report: results.json's shape and numbers, a page that fetches nothing, and runs without a probe."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from benchmarks.phantom_truth import verdict as verdict_of_truth
from docs.draw import overview as draw_overview
from tests.support.report_factory import GRID, PATCH, evaluation_json, own_part, write_run, write_snapshot
from utils.errors import UserError
from utils.report.cli import main, summary
from utils.report.health import health
from utils.report.overview import bars_of
from utils.report.page import POLICY
from utils.report.pictures import (
    Snapshot,
    bscan_with_masks,
    feature_pca,
    load_snapshot,
    png_data,
    save_snapshot,
)
from utils.report.run_files import findings, read_run, results

FULL = np.zeros((200, 100)), (0.01, 0.02)  # a B-scan as a device gives it, and mm along both axes


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "my_run")


class Links(HTMLParser):
    """Collects every attribute that makes a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "poster")
        ]


def test_results_without_probe(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_dir)])
    out = json.loads((run_dir / "results.json").read_text())
    assert out == {
        "data": {"kept": 48, "rejected": {"missing_file": 1, "truncated_pixel_data": 2}},
        "pretraining": {
            "loss_first": pytest.approx(0.69),
            "loss_last": pytest.approx(0.5),
            "skill_mean_last": 0.3,
            "skill_position_last": pytest.approx(0.2),
            "rankme_first": 15.0,
            "rankme_last": 30.0,
            "alarms": [],
            "volumes_per_s": 105.0,
            "mfu": 0.25,
            "validation_fraction": None,
            "gauges_fraction": pytest.approx(0.02),
        },
        "truth": None,
        "probe": None,
        "evaluation": None,
        "seconds": {"prepare": 12.2, "train": 100.5},
    }
    printed = capsys.readouterr().out.splitlines()
    first = [["picture", str(run_dir / "picture.png")], ["report", str(run_dir / "report.html")]]
    assert [line.split() for line in printed[:2]] == first
    assert "48 kept, 3 rejected (truncated_pixel_data 2, missing_file 1)" in printed[3]
    assert len(printed) <= 8
    page = (run_dir / "report.html").read_text()
    assert "Not evaluated" in page
    assert "synthetic data" in page
    shares = re.findall(r"<td>([a-z ]+)</td><td[^>]*>([\d.]+%)</td>", page)
    assert shares == [("data wait", "2.0%"), ("forward", "98.0%")]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((0.02, 0.1), "Pre-training beats random initialisation"),
        ((-0.1, -0.02), "Pre-training is worse than random initialisation"),
        ((-0.02, 0.1), "No difference shown: the interval includes zero"),
    ],
)
def test_results_with_probe_whichever_side_wins(
    run_dir: Path, interval: tuple[float, float], words: str
) -> None:
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation_json(*interval)))
    run = read_run(run_dir)
    probe = results(run)["probe"]
    assert set(probe) == {"pretrained", "random_init", "paired_difference", "n_participants", "verdict"}
    assert set(probe["pretrained"]) == set(probe["random_init"]) == {"balanced_accuracy", "ci95"}
    assert probe["random_init"]["balanced_accuracy"] == 0.5
    assert probe["paired_difference"]["ci95"] == list(interval)
    assert probe["verdict"].startswith(words)
    assert dict(summary(run))["verdict"].startswith(words)


def truth_json(low: float, high: float) -> dict:
    """truth.json of two questions whose differences have this interval."""
    names = ("pretrained", "random_init", "control", "27_patches")
    difference = {"mean": (low + high) / 2, "ci95": [low, high], "doubt": ""}
    differences = dict.fromkeys(names[1:], difference)
    compared = {"linear": list(names[1:]), "hidden": list(names[1:])}
    of_row = {"r2": 0.6, "ci95": [0.5, 0.7], "val_r2": 0.55}
    row = of_row | {"chosen_c": 0.01, "hidden": of_row | {"r2": 0.65}}
    labels = {name: f"features of {name}" for name in names}
    both = {"linear": differences, "hidden": differences}
    return {
        "labels": labels,
        "control_step": 2,
        "n_participants": 19,
        "n_volumes": 57,
        "n_tokens": 5432,
        "layers": ["RNFL", "GCL"],
        "questions": [
            {
                "name": name,
                "rows": [row | {"name": arm} for arm in names],
                "differences": differences,
                "hidden": {"differences": differences},
                "compared": compared,
                "verdict": verdict_of_truth(name, both, compared, labels),
            }
            for name in ("occupancy", "thickness")
        ],
    }


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (
            (0.02, 0.1),
            "gained by training. Pre-training is better than random initialisation, the control and "
            "features of 27_patches.",
        ),
        ((-0.1, -0.02), "no gain shown. Pre-training is worse than random initialisation, the "),
        ((-0.02, 0.1), "no gain shown. Pre-training is not shown to differ from random init"),
    ],
)
def test_the_truth_comes_before_the_classes_whichever_side_wins(
    run_dir: Path, capsys: pytest.CaptureFixture[str], interval: tuple[float, float], words: str
) -> None:
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation_json(0.02, 0.1)))
    (run_dir / "truth.json").write_text(json.dumps(truth_json(*interval)))
    main([str(run_dir)])
    lines = capsys.readouterr().out.splitlines()
    names = [line[:13].strip() for line in lines]
    at = names.index("layers")
    assert names[at : at + 3] == ["layers", "thickness", "classes"]
    gained = "gained by training" if interval[0] > 0 else "no gain shown"
    for line in lines[at : at + 2]:
        assert line[14:] == f"R2 0.600; best of the others 0.600, features of random_init: {gained}"
    assert names[0] == "picture"
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 2 * 110, "two lines of a terminal"
    page = (run_dir / "report.html").read_text()
    assert page.index(words) < page.index("Pre-training beats random") < page.index("In numbers")
    assert page.index("layer occupancy of 5432 tokens") < page.index("raw-voxel PCA")
    assert "features of control" in page
    assert "0.650 [0.500, 0.700]" in page
    out = json.loads((run_dir / "results.json").read_text())["truth"]
    assert out["questions"][0]["differences"]["control"]["ci95"] == list(interval)
    assert out["n_tokens"] == 5432


def test_a_truth_of_one_readout_is_still_reported(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of before the second readout and the rows without an encoder."""
    old = truth_json(0.02, 0.1)
    for question in old["questions"]:
        del question["hidden"], question["compared"]
        for row in question["rows"]:
            del row["hidden"]
    (run_dir / "truth.json").write_text(json.dumps(old))
    main([str(run_dir)])
    assert "R2 0.600; best of the others 0.600, features of random_init" in capsys.readouterr().out
    assert "hidden layer: R2" not in (run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    ("has_eye", "has_bars"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_the_first_screen_shows_an_eye_and_bars(run_dir: Path, has_eye: bool, has_bars: bool) -> None:
    """Both parts in one picture, and before the curves in the page, where the run has them."""
    if not has_eye:
        shutil.rmtree(run_dir / "snapshots")
    if has_bars:
        (run_dir / "truth.json").write_text(json.dumps(truth_json(0.02, 0.1)))
    main([str(run_dir)])
    page = (run_dir / "report.html").read_text()
    shown = [page.index(match) for match in re.findall(r'<img src="data:image/png;base64,[^"]{20}', page)]
    assert len(shown) == has_eye + has_bars
    assert all(page.index('id="verdict"') < at < page.index('id="training"') for at in shown)
    assert (run_dir / "picture.png").exists() == (has_eye or has_bars)


def test_the_bars_are_those_of_the_evaluation_where_there_is_no_truth(run_dir: Path) -> None:
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation_json(0.02, 0.1)))
    bars = bars_of(read_run(run_dir))
    assert bars is not None
    assert (bars.title, bars.score) == ("study_group", "balanced accuracy")
    assert [row[0] for row in bars.rows] == ["pre-trained encoder", "random initialisation", "raw-voxel PCA"]


def test_page_is_one_self_contained_file(run_dir: Path) -> None:
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation_json(0.02, 0.1)))
    (run_dir / "check_report.json").write_text(json.dumps(check_json()))
    main([str(run_dir)])
    page = (run_dir / "report.html").read_text()
    assert "Something is wrong in 1 files, of which 10 of 100 bytes (10.00%) were fetched" in page
    assert page.index("Pre-training beats") < page.index("In numbers")  # the verdict comes first
    assert page.index("OVERLAP") < page.index("In numbers")
    assert "raw-voxel PCA" in page
    links = Links()
    links.feed(page)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links.addresses)
    assert not {"link", "iframe", "object", "base"} & set(links.tags)
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert [html.unescape(text) for text in policy] == [POLICY]
    assert POLICY.startswith("default-src 'none';")
    assert not re.search("connect-src|https?:|[*]", POLICY)
    content = json.loads(page.partition('id="content">')[2].partition("</script>")[0])
    for volume in content["volumes"]:
        for name, magic in (("sheet", b"\xff\xd8"), ("enface", b"\x89PNG")):
            head, _, data = volume[name].partition(",")
            assert head.startswith("data:image/")
            assert base64.b64decode(data, validate=True).startswith(magic)
    assert "<b>not bold</b>" not in page  # text of the run is text


def test_the_files_of_an_evaluation_are_linked(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a head, which has no probes: its verdict stands first, and each link leads to a file."""
    (run_dir / "figures").mkdir()
    for name in ("roc", "confusion", 'a "b"'):
        (run_dir / "figures" / f"{name}.png").write_bytes(b"")
    main([str(run_dir)])
    assert "figures/" not in (run_dir / "report.html").read_text()  # of an evaluation that was cut short
    answer = {
        "title": "study_group: 2 classes",
        "verdict": "The head beats a constant.",
        "cautions": ["Few."],
    }
    subject = {"name": "head", "url": "checkpoints/head.pt"}
    (run_dir / "evaluation.json").write_text(
        json.dumps(evaluation_json(0.02, 0.1) | answer | {"subject": subject})
    )
    (run_dir / "evaluation.md").write_text("tables")
    main([str(run_dir)])
    page = (run_dir / "report.html").read_text()
    links = Links()
    links.feed(page)
    local = [link for link in links.addresses if not link.startswith(("#", "data:image/png;base64,"))]
    assert local == ["evaluation.md", 'figures/a "b".png', "figures/confusion.png", "figures/roc.png"]
    assert all((run_dir / link).is_file() for link in local)
    for text in ("The head beats a constant.", "Few.", "study_group: 2 classes"):
        assert page.index(text) < page.index("In numbers")
    assert "Not evaluated" not in page
    out = json.loads((run_dir / "results.json").read_text())
    assert (out["evaluation"], out["probe"]) == (answer, None)
    assert "verdict       The head beats a constant." in capsys.readouterr().out


PATIENT = "oct/SMITH^JOHN_19500101_OD.dcm"


def test_a_file_is_told_by_its_digest_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is shared, and clinics put names and birthdays into file names."""
    other = PATIENT.replace("SMITH", "SMITHE")
    prepared = json.loads((run_dir / "prepare_report.json").read_text())
    prepared["run"]["audit"] = {"missing": {"count": 2, "first": [PATIENT, other]}}
    prepared["rejected_files"] = {"missing_file": [PATIENT]}
    (run_dir / "prepare_report.json").write_text(json.dumps(prepared))
    main([str(run_dir)])
    page = own_part(run_dir / "report.html")
    row = page[page.index("<td>missing_file</td>") :].partition("</tr>")[0]
    shared = page + (run_dir / "results.json").read_text()
    shared += capsys.readouterr().out
    assert not re.search("smith|john|jane|19500101", shared, re.IGNORECASE)
    digests = set(re.findall(r"file [0-9a-f]{12}", shared))
    assert len(digests) == 2
    main([str(run_dir), "--file", row.partition("file ")[2][:12]])
    assert capsys.readouterr().out.strip() == PATIENT
    for digest in digests:
        main([str(run_dir), "--file", digest.removeprefix("file ")])
    assert sorted(capsys.readouterr().out.split()) == sorted([PATIENT, other])
    with pytest.raises(UserError, match=r"--file: expected a digest of .*, found 0123"):
        main([str(run_dir), "--file", "0123"])


def check_json() -> dict:
    """Of what a check of the tree writes, what the page says."""
    read = {"share": 0.1, "fetched": 10, "stored": 100}
    return {"is_fine": False, "records": 1, "ok": 0, "unread": 0, "bytes": read}


def test_a_bare_run_still_reports(run_dir: Path) -> None:
    """A short run has no validation, no pictures, no stages: all of that is said, nothing fails."""
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5, "train/grad_norm": "nan"}\n')
    (run_dir / "stages.tsv").unlink()
    for path in (run_dir / "snapshots").iterdir():
        path.unlink()
    prepared = json.loads((run_dir / "prepare_report.json").read_text()) | {"synthetic": False}
    (run_dir / "prepare_report.json").write_text(json.dumps(prepared))
    main([str(run_dir)])
    assert "Check of the tree" not in (run_dir / "report.html").read_text()
    out = json.loads((run_dir / "results.json").read_text())
    assert out["pretraining"]["loss_first"] == out["pretraining"]["loss_last"] == 0.5
    assert out["pretraining"]["rankme_first"] is None
    assert out["pretraining"]["volumes_per_s"] is None
    assert out["pretraining"]["mfu"] is None
    assert out["seconds"] == {}
    page = (run_dir / "report.html").read_text()
    assert "train/grad_norm was not finite at step 1" in page
    assert "This run wrote no pictures" in page
    assert "The terms of the data apply" in page
    assert "synthetic data" not in page


def test_a_repeated_step_counts_once(run_dir: Path) -> None:
    """A run killed after its checkpoint logs some steps again when it resumes."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "train/loss": 0.25}\n{"step": 10, "train/loss": 0.75}\n')
    run = read_run(run_dir)
    steps = [step for step, _ in run.series["train/loss"]]
    assert steps == list(range(10, 201, 10))
    assert results(run)["pretraining"]["loss_first"] == 0.75
    assert results(run)["pretraining"]["loss_last"] == 0.25


def test_alarms_stand_in_the_table_the_page_and_results(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run_dir)])
    assert "alarm " not in capsys.readouterr().out
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "alarm": "collapse", "text": "features collapse: <b>"}\n')
    main([str(run_dir)])
    assert "step 210: features collapse: <b>" in capsys.readouterr().out
    out = json.loads((run_dir / "results.json").read_text())
    assert out["pretraining"]["alarms"] == [{"step": 210, "text": "features collapse: <b>"}]
    assert "Alarm at step 210: features collapse: &lt;b&gt;" in (run_dir / "report.html").read_text()


def test_findings_say_what_the_numbers_warn_of(run_dir: Path) -> None:
    assert findings(read_run(run_dir)) == []
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "val/skill_position": -0.1, "ema/init_weight": 0.4, "val/rankme": 3.0}\n')
    sentences = findings(read_run(run_dir))
    assert len(sentences) == 1
    assert "40%" in sentences[0]


def test_ranks_of_different_numbers_of_volumes_are_not_compared(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before step 1 a validation reads a quarter; only like and like are set side by side."""
    points = [(0, 66.8, 4), (80, 30.0, 16), (160, 20.0, 16)]
    lines = [f'{{"step": {s}, "val/rankme": {rank}, "val/volumes": {n}}}\n' for s, rank, n in points]
    for count, first, shown in ((1, None, "RankMe 66.8,"), (2, None, "RankMe 30,"), (3, 30.0, "30 -> 20,")):
        (run_dir / "metrics.jsonl").write_text("".join(lines[:count]))
        main([str(run_dir)])
        assert shown in capsys.readouterr().out
        run = read_run(run_dir)
        assert results(run)["pretraining"]["rankme_first"] == first
        reasons = health(run.series, run.alarms, run.not_finite).reasons
        assert any("val/rankme went" in reason for reason in reasons) == (count == 3)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "provenance.json", "prepare_report.json"])
def test_a_missing_file_is_named(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    with pytest.raises(UserError, match=re.escape(name)):
        main([str(run_dir)])


def test_damage_is_named_with_its_line(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a run directory"):
        read_run(tmp_path / "absent")
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    for damage in (
        b'{"step": 21',
        b'{"train/loss": 1}',
        b"[1]",
        b"7",
        b'{"step": 21, "\xff": 1}',
        b'{"st\x0bep": 1}',
    ):
        metrics.write_bytes(whole + damage + b"\n")
        with pytest.raises(UserError, match=r'metrics.jsonl:21: expected JSON with "step"'):
            read_run(run_dir)
    metrics.write_bytes(b'{"step": 1, \n' + whole[:-9])
    with pytest.raises(UserError, match=r"metrics.jsonl:1: expected JSON"):
        read_run(run_dir)


def test_a_run_that_is_running_or_was_killed_reports(run_dir: Path) -> None:
    """Its last line may be cut anywhere; the lines before count."""
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole) - 1):
        metrics.write_bytes(whole[:end])
        assert [step for step, _ in read_run(run_dir).series["train/loss"]] == list(range(10, 200, 10))
    main([str(run_dir)])
    metrics.write_bytes(whole[:-1])  # complete but for its newline
    assert read_run(run_dir).series["train/loss"][-1][0] == 200


# --- pictures ---


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    write_snapshot(tmp_path / "deep" / "a.npz")
    return load_snapshot(tmp_path / "deep" / "a.npz")


def test_snapshot_survives_the_file(snapshot: Snapshot, tmp_path: Path) -> None:
    assert snapshot.volume.shape == (16, 96, 64)
    assert (snapshot.grid, snapshot.patch) == (GRID, PATCH)
    assert snapshot.spacing == (0.375, 0.024, 0.09375)
    assert snapshot.title == "step 200, row 3"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.npz"]  # no partial file stays


def test_snapshot_refuses_what_does_not_fit(snapshot: Snapshot, tmp_path: Path) -> None:
    for change, message in [
        ({"volume": snapshot.volume.astype(np.float32)}, "volume: expected uint8"),
        ({"volume": snapshot.volume[:8]}, r"volume: expected uint8 \(16, 96, 64\)"),
        ({"features": snapshot.features[:7]}, "features: expected 384 tokens, found 7"),
    ]:
        with pytest.raises(ValueError, match=message):
            save_snapshot(tmp_path / "b.npz", replace(snapshot, **change))
    assert not (tmp_path / "b.npz").exists()


def test_masks_lie_on_their_patches(snapshot: Snapshot) -> None:
    """Token (d 2, h 1, w 3) as the only context: in plane 9 exactly its 8 x 8 voxels are tinted blue."""
    token = np.ravel_multi_index((2, 1, 3), GRID)
    dark = np.zeros((16, 96, 64), np.uint8)
    one = replace(snapshot, context=np.array([token]), target=np.array([], int), volume=dark)
    figure = bscan_with_masks(one, num_planes=16)
    for plane in (7, 8, 9, 11, 12):
        where = np.argwhere(figure.axes[16 + plane].images[0].get_array()[..., 2] > 0)
        assert len(where) == (64 if plane in (8, 9, 11) else 0)
        if len(where):
            assert (where.min(axis=0).tolist(), where.max(axis=0).tolist()) == ([8, 24], [15, 31])
    every = replace(one, context=np.arange(len(one.valid)), target=np.arange(len(one.valid)))
    seen = bscan_with_masks(every, num_planes=16).axes[16 + 9].images[0].get_array()
    assert (seen[..., 2] > seen[..., 0])[:, :48].all()  # nothing is hidden: blue, where it is valid
    titles = [axis.get_title(loc="left") for axis in draw_overview.overview(*FULL, every, every).axes]
    assert "masked" not in titles[1]
    one.valid[token] = 0  # padding belongs to neither set
    assert not bscan_with_masks(one, num_planes=16).axes[16 + 9].images[0].get_array().any()


def test_pictures_have_the_proportions_of_the_eye(snapshot: Snapshot) -> None:
    for figure in (bscan_with_masks(snapshot), feature_pca(snapshot)):
        assert all(axis.get_aspect() == 1.0 for axis in figure.axes)
    extents = [axis.images[0].get_extent() for axis in feature_pca(snapshot).axes]
    height, width, length = 96 * 0.024, 64 * 0.09375, 16 * 0.375  # mm
    for extent, expected in zip(extents, [height, length, length, height], strict=True):
        np.testing.assert_allclose(extent, (0, width, expected, 0))


def test_feature_colours_follow_the_features_and_leave_invalid_tokens_grey(snapshot: Snapshot) -> None:
    features = np.zeros((384, 6))
    features[:, 0] = np.indices(GRID)[1].ravel()  # one direction only: the axial position
    image = feature_pca(replace(snapshot, features=features)).axes[3].images[0].get_array()
    red = image[:, 0, 0]
    assert (red[0], red[-1]) == (0, 1)
    assert (np.diff(red) >= 0).all()
    np.testing.assert_array_equal(image[:, -2:], 0.5)


def test_png_data_is_a_picture(snapshot: Snapshot) -> None:
    text = png_data(feature_pca(snapshot), dpi=40)
    assert base64.b64decode(text.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_pictures_of_the_documents_are_drawn_from_a_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first volume, at its first and its last step; each picture is small enough for a repository."""
    write_snapshot(run_dir / "snapshots" / "step_00000200_row_000009.npz", "step 200, row 9")
    folder = tmp_path / "docs"
    monkeypatch.setattr(draw_overview, "full_bscan", lambda *_: FULL)  # this run has no store
    draw_overview.main(["--run", str(run_dir)], folder)
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert paths == [folder / "overview.png", folder / "masks.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 300_000
    (run_dir / "snapshots" / "step_00000000_row_000003.npz").unlink()
    with pytest.raises(UserError, match="pictures of one volume at two steps, found 1"):
        draw_overview.main(["--run", str(run_dir)], folder)


def test_the_overview_gives_equal_features_equal_colours(snapshot: Snapshot) -> None:
    """Features that only changed their signs and order keep their colours; the titles name the step."""
    before = replace(snapshot, title="volume, step 0")
    after = replace(snapshot, features=-snapshot.features[:, ::-1], title="volume, step 7")
    figure = draw_overview.overview(*FULL, before, after)
    images = [axis.images[0].get_array() for axis in figure.axes]
    np.testing.assert_allclose(images[2], images[3], atol=1e-3)
    assert [axis.get_title(loc="left")[-6:] for axis in figure.axes][1::2] == ["masked", "step 7"]
    assert all(axis.get_aspect() == 1.0 for axis in figure.axes)
