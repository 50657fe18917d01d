"""How sure a head may be: its temperature, its distance from the training, what its evidence adds up to, also
by occlusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from einops import reduce
from matplotlib.text import Text
from scipy.ndimage import gaussian_filter
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from data_setup.manifest import unknown_record
from data_setup.readers.open_record import open_record
from finetuning.embedding.volumes import LOOKS, Looks
from finetuning.heads.confidence import (
    Calibration,
    calibrate,
    fit_familiarity,
    stored_calibration,
    stored_familiarity,
)
from finetuning.heads.head_file import Standardise
from finetuning.prediction.evidence import (
    ATTENTION,
    CONTRIBUTIONS,
    GRADIENT,
    against_others,
    block_of,
    blocks_of,
    cheap_map,
    evidence_of,
    hide,
    occlusion_map,
)
from finetuning.prediction.lines import NO_ANSWER, cautions_of
from finetuning.prediction.picture import NOTICE, Page, draw
from models.heads import build_head
from models.probes.features import pool_tokens
from tests.support.finetune_factory import RUNTIME, config
from tests.support.heights_factory import make_tree
from utils.checkpoint import CheckpointWriter, load_checkpoint

PEOPLE = 60


def overconfident(seed: int = 0, classes: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, 4], classes [n] and persons [n] with two volumes each, hard to tell apart."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, 2 * PEOPLE)
    features = rng.normal(size=(2 * PEOPLE, 4)) + 0.6 * np.eye(4)[label]
    return features, label, np.repeat(np.arange(PEOPLE), 2).astype(str)


def test_the_temperature_is_scikit_learns() -> None:
    features, label, person = overconfident()
    model = LogisticRegression(C=1e3).fit(features[:20], label[:20])
    with_temperature = CalibratedClassifierCV(FrozenEstimator(model), method="temperature", cv=2)
    with_temperature.fit(features[20:], label[20:])
    logits = torch.from_numpy(model.decision_function(features[20:]))
    calibration = calibrate("classification", logits, label[20:, None].astype(float), person[20:])
    probabilities = calibration.scores("classification", logits)
    assert probabilities is not None
    assert calibration.temperature is not None
    assert calibration.temperature > 1.2
    np.testing.assert_allclose(
        probabilities.numpy(), with_temperature.predict_proba(features[20:]), atol=2e-3
    )
    assert calibration.loss_after is not None
    assert calibration.loss_after < (calibration.loss_before or 0.0)


def test_no_temperature_where_validation_does_not_allow_one() -> None:
    _, label, person = overconfident()
    target = label[:, None].astype(float)
    knowing = torch.from_numpy(6.0 * np.eye(3)[label])
    few = calibrate("classification", knowing[:30], target[:30], person[:30])
    assert few.text() == "uncalibrated: expected 20 validation participants, found 15"
    assert few.scores("classification", knowing) is None
    without_error = calibrate("classification", knowing, target, person)
    assert "no temperature between" in without_error.text()
    assert calibrate("regression", knowing[:, :1], target, person).temperature is None
    right = torch.from_numpy(np.log(np.full((len(label), 3), 0.05) + 0.85 * np.eye(3)[label]))
    wrong = np.random.default_rng(1).random(len(label)) < 0.1  # as often as it says
    right[wrong] = right[wrong].roll(1, dims=1)
    as_it_is = calibrate("classification", right, target, person)
    assert as_it_is.temperature is None or abs(as_it_is.temperature - 1) < 0.15
    assert stored_calibration({}).text().startswith("uncalibrated: the head's file holds no calibration")


def test_a_temperature_must_help_people_that_it_was_not_fitted_on() -> None:
    """Outputs that are as sure as they may be: a temperature fitted on 24 people helps these alone."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(24, 3))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = np.array([[rng.choice(3, p=row)] for row in chances], float)
    calibration = calibrate("classification", torch.from_numpy(logits), target, np.arange(24).astype(str))
    assert calibration.temperature is None
    assert "does not lower the log loss of people left out" in calibration.text()


def test_a_person_weighs_the_same_with_many_volumes() -> None:
    """Volumes of one person that are all wrong do not decide for the others."""
    features, label, person = overconfident()
    logits = torch.from_numpy(2.0 * features[:, :3])
    once = calibrate("classification", logits, label[:, None].astype(float), person)
    places = np.concatenate([np.arange(len(label)), *[np.flatnonzero(person == "0")] * 20])
    again = calibrate("classification", logits[places], label[places, None].astype(float), person[places])
    assert once.temperature == pytest.approx(again.temperature, rel=1e-3)


def test_labels_have_a_temperature_too() -> None:
    rng = np.random.default_rng(0)
    truth = (rng.random((200, 2)) < 0.3).astype(float)
    logits = torch.from_numpy(4 * (truth - 0.5) + rng.normal(size=truth.shape) * 5)
    calibration = calibrate("multilabel", logits, truth, np.arange(200).astype(str))
    assert calibration.temperature is not None
    assert calibration.temperature > 2


def test_distance_is_that_of_probabilistic_pca() -> None:
    """Up to a constant it is the log-likelihood of scikit-learn's PCA."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(80, 12)) * np.arange(1, 13) @ rng.normal(size=(12, 12))
    person = np.repeat(np.arange(40), 2).astype(str)
    known = fit_familiarity(features, person)
    assert known is not None
    assert known.components.shape == (10, 12)
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    likelihood = PCA(10, svd_solver="full").fit(scaled).score_samples(scaled)
    twice = known.distance(features) ** 2 + 2 * likelihood
    np.testing.assert_allclose(twice, twice.mean(), rtol=1e-8)


def test_percentiles_are_of_people_that_were_held_out(tmp_path: Path) -> None:
    """New people like those of training lie between 0 and 100, strangers at 100; the file keeps it."""
    rng = np.random.default_rng(0)
    draw = rng.normal(size=(30, 40))
    features, person = rng.normal(size=(120, 30)) @ draw, np.repeat(np.arange(60), 2).astype(str)
    known = fit_familiarity(features, person)
    assert known is not None
    writer = CheckpointWriter(str(tmp_path), keep_last=None)
    writer.save({"step": 1, "familiarity": known.state()}, ["head"])
    writer.close()
    again = stored_familiarity(load_checkpoint(str(tmp_path / "head.pt")))
    assert again is not None
    new = rng.normal(size=(300, 30)) @ draw
    assert 35 < again.percentile(new).mean() < 65
    np.testing.assert_allclose(again.percentile(new), known.percentile(new), atol=0.5)
    assert (again.percentile(new + 12 * rng.normal(size=new.shape)) == 100).mean() > 0.9
    assert fit_familiarity(features[:10], person[:10]) is None
    assert fit_familiarity(np.ones((40, 5)), np.arange(40).astype(str)) is None
    assert stored_familiarity({}) is None


def head_of(kind: str, standardise: Standardise | None, task: str = "classification") -> Any:
    torch.manual_seed(3)
    module = build_head(kind, 8, 3, 5).eval()
    for parameter in module.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    state = {"head_kind": kind, "task": {"label_column": "x"}}
    return SimpleNamespace(
        module=module, standardise=standardise, state=state, kind=task, names=("a", "b", "c")
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_contributions_add_up_to_the_output(scaled: bool) -> None:
    torch.manual_seed(0)
    tokens, valid = torch.randn(1, 20, 8), torch.ones(1, 20)
    valid[0, 15:] = 0
    scale = Standardise(np.random.default_rng(0).normal(size=16), np.full(16, 0.7)) if scaled else None
    head = head_of("linear", scale)
    pooled = pool_tokens(tokens, valid)
    outputs = head.module(pooled if scale is None else scale(pooled))[0]
    evidence = evidence_of(head, tokens, valid, outputs)
    best = int(outputs.argmax())
    others = [i for i in range(3) if i != best]
    bias = head.module.last.bias
    expected = (outputs - bias)[best] - (outputs - bias)[others].mean()
    assert float(evidence.values.sum()) == pytest.approx(float(expected), rel=1e-4)
    assert (evidence.method, evidence.of) == (CONTRIBUTIONS, head.names[best])
    assert (evidence.values[15:] == 0).all()
    assert (evidence.centred(valid[0])[15:] == 0).all()
    assert float(evidence.centred(valid[0])[:15].median()) == pytest.approx(0, abs=1e-6)


def test_first_order_and_attention_follow_the_head() -> None:
    torch.manual_seed(0)
    tokens, valid = torch.randn(1, 20, 8), torch.ones(1, 20)
    valid[0, 15:] = 0
    mlp = head_of("mlp", None, "multilabel")
    outputs = mlp.module(pool_tokens(tokens, valid))[0]
    evidence = evidence_of(mlp, tokens, valid, outputs)
    assert evidence.method == GRADIENT
    place, step = int(evidence.values.argmax()), 1e-3
    moved = tokens.clone()
    moved[0, place] += step * tokens[0, place]
    change = mlp.module(pool_tokens(moved, valid))[0] - outputs
    assert float(change[outputs.argmax()]) != 0.0
    looking = head_of("attentive", None)
    attention = evidence_of(looking, tokens, valid, looking.module(tokens, valid)[0])
    assert attention.method == ATTENTION
    assert float(attention.values.sum()) == pytest.approx(1, abs=1e-5)
    assert (attention.values[15:] == 0).all()
    far = tokens.clone()  # what it looks at most moves the output most
    order = attention.values[:15].argsort()
    moves = []
    for number in (int(order[0]), int(order[-1])):
        without = valid.clone()
        without[0, number] = 0
        moves.append(float((looking.module(far, without) - looking.module(far, valid)).abs().sum()))
    assert moves[0] < moves[1]


SOUND: dict[str, Any] = {"valid_fraction": 0.9, "lost_fraction": 0.0, "orientation_source": "position"}
SOUND |= {"spacing_before_d": 0.047, "spacing_before_h": 0.0026, "spacing_before_w": 0.0117}
SOUND |= {"signal_db": 15.0, "clipped_share": 0.0, "motion_um": 4.0, "missing_share": 0.0}
SOUND |= {"saturated_share": 0.001}
FAR = "far from all that the head was trained on, 47.0 to 50.0 um"


def test_cautions_name_what_is_out_of_range() -> None:
    fields = SOUND
    assert cautions_of(fields, 50.0) == []
    bad = {"signal_db": 3.0, "clipped_share": 0.2, "motion_um": 44.0, "missing_share": 0.1}
    assert cautions_of(fields | bad, 50.0) == [
        "weak signal: 3.0 dB over the background",
        "the retina touches the scan's edge in 20% of the A-scans",
        "B-scans jump by 44 um axially on average",
        "10% of the B-scans are blank or repeated",
    ]
    for known in (0.12, 0.24, 0.25, 3 / 320):  # Heidelberg's rasters, and angiography over 3 x 3 mm
        assert cautions_of(fields | {"spacing_before_d": known, "spacing_before_w": 0.0057}, None) == []
        at_hand = fields | {"spacing_before_d": known}
        few = cautions_of(at_hand, None, {"d": [0.047, 0.05], "h": [0.0026]})
        assert few == [f"spacing between B-scans: {1000 * known:.1f} um, {FAR}"] * (known not in (0.24, 0.25))
    for h, trained, count in ((0.0019, 0.0039, 1), (0.0039, 0.0019, 0), (0.0019, 0.0026, 0)):
        warned = cautions_of(fields | {"spacing_before_h": h}, None, {"d": [0.047], "h": [trained]})
        assert ["axial: 1.9 um, far from" in text for text in warned] == [True] * count
    (axial,) = cautions_of(fields | {"spacing_before_h": 0.026}, None)
    assert axial.startswith("spacing axial: 26.0 um, outside ")
    (far,) = cautions_of(fields, 99.5)
    assert "farther from the training set" in far


SPACING = (0.25, 0.0039, 0.0117)
REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "real_labelled" / "volumes"


def eye(name: str, root: Path) -> np.ndarray:
    """uint8 [25, rows, columns] of the phantom, or of a real eye where there is one."""
    if name == "phantom":
        make_tree(root, 1, (), (1,), (25, 248, 128))
        url = str(next((root / "retinal_oct").rglob("*.dcm")))
    elif (REAL / name).is_file():
        url = str(REAL / name)
    else:
        pytest.skip("the real eyes are not part of the project")
    _, frames = open_record(unknown_record(url))
    voxels = np.stack(list(frames))
    return voxels.repeat(2, axis=1).repeat(4, axis=2) if name == "phantom" else voxels


def looked_at(voxels: np.ndarray, spacing_mm: tuple[float, float, float] = SPACING) -> dict[str, Any]:
    looks = Looks()
    for frame in looks.watch(iter(voxels)):
        assert frame.dtype == np.uint8
    measured = {name: value for name, value in looks.columns(spacing_mm).items() if name in LOOKS}
    return SOUND | measured | {f"spacing_before_{a}": mm for a, mm in zip("dhw", spacing_mm, strict=True)}


def another_part(voxels: np.ndarray) -> np.ndarray:
    """Bright lumps of any shape, as in other organs."""
    lumps = gaussian_filter(np.random.default_rng(0).normal(size=voxels.shape), (2, 12, 12))
    return np.where(lumps > 0, 40 + 150 * lumps / lumps.max(), 5).astype(np.uint8)


@pytest.mark.parametrize("name", ["phantom", "1002.nii.gz"])
def test_what_is_no_eye_or_not_as_a_device_writes_it_has_its_warning(name: str, tmp_path: Path) -> None:
    """And the eye itself has none, at the distance of Heidelberg's commonest raster."""
    voxels, rng = eye(name, tmp_path), np.random.default_rng(3)
    d, h, w = voxels.shape[0], 1.92 / voxels.shape[1], 6.0 / voxels.shape[2]
    for step in (0.24, 0.25):
        assert cautions_of(looked_at(voxels, (step, h, w)), 50.0) == []
    table = {
        "seems upside down": voxels[:, ::-1],
        "as unlike as any two": voxels[rng.permutation(d)],
        "dark: 99.9 % of": (0.15 * voxels).astype(np.uint8),
        "seem inverted": 255 - voxels,
        "no layers as a retina": another_part(voxels),
    }
    for text, edited in table.items():
        (found_text,) = cautions_of(looked_at(edited, (0.25, h, w)), 50.0)
        assert text in found_text
    both = cautions_of(looked_at(255 - voxels[:, ::-1], (0.25, h, w)), 50.0)
    assert [text.split(":")[0] for text in both] == [
        "grey values seem inverted",
        "the retina seems upside down",
    ]
    turned = cautions_of(looked_at(np.ascontiguousarray(voxels.swapaxes(1, 2)), (0.25, h, w)), 50.0)
    assert any("another axis" in text for text in turned)
    for shares, text in {
        (0.25, 1, 1): "field across B-scans: 1.6 mm",
        (0.5, 1, 1): "field 3.1 mm across B-scans and 6.0 mm along them: another spacing than the file says",
        (2, 1, 1): "spacing between B-scans: 500.0 um",
        (4, 1, 1): "spacing between B-scans: 1000.0 um",
        (1, 2, 1): "spacing axial",
        (1, 1, 0.5): "field 6.2 mm across B-scans and 3.0 mm along them: another spacing",
        (1, 1, 2): "field 6.2 mm across B-scans and 12.0 mm along them: another spacing",
    }.items():
        pitch = tuple(share * mm for share, mm in zip(shares, (0.25, h, w), strict=True))
        assert any(text in line for line in cautions_of(looked_at(voxels, pitch), 50.0)), text
    wide = looked_at(voxels, (4.4 / len(voxels), h, 8.8 / voxels.shape[2]))
    assert not any("strip" in line for line in cautions_of(wide, 50.0)), "30 by 15 degrees is a raster"
    (deep,) = cautions_of(looked_at(voxels, (0.25, h / 2, w)), 50.0)
    assert deep.startswith("field in depth: 1.0 mm, expected 1 to 7 mm") or "axial" in deep


def test_every_line_of_a_page_lies_on_it() -> None:
    """With more warnings than any scan has; and a page without an answer says so above all else."""
    for bars in ({"a": 0.9, "b": 0.1}, {}):
        many = [f"a warning of some length, that takes two lines of the column: {n}" for n in range(25)]
        page = Page(
            title="scan.dcm",
            lines=["Of a device."],
            bars=bars,
            bars_title="Score",
            warnings=many,
            footer="The map.",
            volume=np.zeros((8, 24, 32), np.uint8),
            spacing_mm=(0.25, 0.02, 0.1),
            valid_box=[0, 8, 0, 24, 0, 32],
            has_answer=False,
        )
        figure = draw(page)
        figure.canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        (notice,) = (text for text in texts if text.get_text() == NOTICE)
        (column,) = (text for text in texts if "The map." in text.get_text())
        (title,) = (text for text in texts if text.get_text().startswith(NO_ANSWER))
        below, column_box, above = (text.get_window_extent() for text in (notice, column, title))
        assert figure.bbox.y0 <= below.y0 < below.y1 < column_box.y0 < column_box.y1 < above.y0
        assert above.y1 <= figure.bbox.y1


def test_a_calibration_says_what_it_did() -> None:
    text = Calibration(1.5, None, 30, 0.7, 0.6).text()
    assert text == (
        "temperature 1.5, fitted on 30 validation participants; log loss of those left out 0.700 -> 0.600"
    )


class Means(nn.Module):
    """A token says the mean of its voxels, four times."""

    def forward(self, view_BCDHW: Tensor) -> Tensor:
        means = reduce(view_BCDHW, "b c (gd d) (gh h) (gw w) -> b (gd gh gw) c", "mean", d=4, h=8, w=8)
        return means.expand(-1, -1, 4)


@dataclass(frozen=True)
class Reader:
    module: nn.Module
    standardise: None = None


def reader(weight: Tensor) -> Reader:
    """A linear head of two outputs that reads the mean of the tokens, not their deviation."""
    module = build_head("linear", 4, 2, 0).eval().requires_grad_(False)
    assert isinstance(module.last, nn.Linear)
    module.last.weight.zero_()
    module.last.weight[:, :4] = weight
    module.last.bias.copy_(torch.tensor([0.3, -0.2]))
    return Reader(module)


def test_occlusion_and_contributions_agree_where_the_head_is_linear(tmp_path: Path) -> None:
    """Of mean tokens, hiding one takes away its own part: two ways to the same map."""
    cfg = config(tmp_path, tmp_path / "run")
    torch.manual_seed(0)
    view, valid = torch.randn(1, 1, 8, 24, 32), torch.ones(1, 24)
    valid[0, 20:] = 0
    heads = [reader(torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0]])), reader(torch.eye(2, 4))]
    heads.append(reader(torch.tensor([[0.0] * 4, [1.0, 0, 0, 0]])))
    weights = against_others(1, 2)
    maps = [occlusion_map(Means(), head, view, valid, weights, cfg, RUNTIME) for head in heads]
    for head, values in zip(heads, maps, strict=True):
        expected = cheap_map(head, Means()(view), valid, weights)[0]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)
        assert (values[20:] == 0).all()
    tokens = Means()(view)[0, :20, 0]
    torch.testing.assert_close(maps[0][:20], 0.0 * tokens, atol=1e-5, rtol=0)  # 3 for it, 1 + 2 against
    torch.testing.assert_close(maps[2][:20], tokens / 20, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp", "attentive"])
def test_a_map_of_a_head_that_may_still_be_trained_is_numbers(kind: str) -> None:
    """The control comes out of training: its parameters want gradients, its map has none."""
    control = Reader(build_head(kind, 4, 2, 3).eval())
    values = cheap_map(control, torch.randn(1, 24, 4), torch.ones(1, 24), against_others(1, 2))
    assert values.numpy().shape == (1, 24)


def test_hidden_tokens_are_the_mean_and_nothing_else_changes(tmp_path: Path) -> None:
    cfg = config(tmp_path, tmp_path / "run")
    view, hidden = torch.randn(1, 1, 8, 24, 32), torch.zeros(2, 24, dtype=torch.bool)
    hidden[1, 6] = True  # the second of four along w, the second of three along h, the first along d
    changed = hide(view, hidden, cfg)
    assert torch.equal(changed[0], view[0])
    assert (changed[1, 0, :4, 8:16, 16:24] == 0).all()
    assert int((changed[1] != view[0]).sum()) == 4 * 8 * 8


@pytest.mark.parametrize(
    ("grid", "block"), [((2, 3, 4), (1, 1, 1)), ((4, 12, 8), (1, 2, 2)), ((16, 24, 24), (4, 8, 4))]
)
def test_blocks_cover_every_token_once(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    assert block_of(grid) == block
    blocks = blocks_of(grid, block)
    assert len(blocks) <= 128
    assert (blocks.sum(dim=0) == 1).all()
    first = np.flatnonzero(blocks[0].view(grid).any(dim=(1, 2))), blocks[0].view(grid)[0].any(dim=1).sum()
    assert (len(first[0]), int(first[1])) == block[:2]
