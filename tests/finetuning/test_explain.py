"""Maps are scored by the truth: hand cases of each map and each number, and what the numbers allow to say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from einops import reduce
from torch import Tensor, nn

from finetuning.explanations.arms import RANDOM_ENCODER, RANDOM_HEAD, TRAINED
from finetuning.explanations.eyes import Eyes
from finetuning.explanations.measure import (
    BRIGHTNESS,
    PLACE,
    RANDOM_ORDER,
    SHARES,
    TRUTH_ORDER,
    Measured,
    _losses,
    _orders,
    auprc_of,
    control_order,
    hidden_sets,
    usual_place,
)
from finetuning.explanations.table import judge, mean_over_people
from finetuning.prediction.evidence import (
    ATTENTION,
    CONTRIBUTIONS,
    OCCLUSION,
    against_others,
    cheap_map,
)
from finetuning.prediction.judgement import NOT_JUDGED, judgement_of
from finetuning.prediction.occlusion import block_of, blocks_of, hide, occlusion_maps
from models.heads import build_head
from tests.support.finetune_factory import RUNTIME, config
from utils.config.schema import StorageOptions
from utils.errors import UserError

OPTIONS = StorageOptions()
PERSON = np.repeat(np.arange(12), 2).astype(str)  # of 24 eyes


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
    module = build_head("linear", 4, 2, 0, 0.0).eval().requires_grad_(False)
    assert isinstance(module.last, nn.Linear)
    module.last.weight.zero_()
    module.last.weight[:, :4] = weight
    module.last.bias.copy_(torch.tensor([0.3, -0.2]))
    return Reader(module)


def test_occlusion_and_contributions_agree_where_the_head_is_linear(tmp_path: Path) -> None:
    """Of mean tokens, hiding one takes away its own part: two ways to the same map, for two heads at once."""
    cfg = config(tmp_path, tmp_path / "run")
    torch.manual_seed(0)
    view, valid = torch.randn(1, 1, 8, 24, 32), torch.ones(1, 24)
    valid[0, 20:] = 0
    heads = [reader(torch.tensor([[1.0, 0, 2, 0], [0, 3, 0, 0]])), reader(torch.eye(2, 4))]
    weights = against_others(1, 2)
    maps = occlusion_maps(Means(), heads, view, valid, weights, cfg, RUNTIME)
    for head, values in zip(heads, maps, strict=True):
        expected = cheap_map(head, Means()(view), valid, weights)[0]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)
    tokens = Means()(view)[0, :20, 0]
    torch.testing.assert_close(maps[0, :20], 0.0 * tokens, atol=1e-5, rtol=0)  # 3 for it, 1 + 2 against
    assert (maps[:, 20:] == 0).all()
    alone = occlusion_maps(
        Means(), [reader(torch.tensor([[0.0] * 4, [1.0, 0, 0, 0]]))], view, valid, weights, cfg, RUNTIME
    )
    torch.testing.assert_close(alone[0, :20], tokens / 20, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp", "attentive"])
def test_a_map_of_a_head_that_may_still_be_trained_is_numbers(kind: str) -> None:
    """The control comes out of training: its parameters want gradients, its map has none."""
    control = Reader(build_head(kind, 4, 2, 3, 0.0).eval())
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


def eyes_of(truth: np.ndarray, valid: np.ndarray, person: np.ndarray) -> Eyes:
    count = len(truth)
    return Eyes(np.arange(count), person, truth, valid, np.arange(0), 1, 0)


def test_auprc_by_hand_and_where_changes_usually_are() -> None:
    truth = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0]], bool)
    valid = np.array([[1, 1, 1, 1, 0]] * 3, bool)
    eyes = eyes_of(truth, valid, np.array(["a", "a", "b"]))
    maps = np.array([[0.9, 0.8, 0.7, 0.1, 5.0], [0.1, 0.2, 0.3, 0.4, 5.0], [0.0, 1.0, 0.0, 0.0, 5.0]])
    # precision 1 at the first token found and 2/3 at the second; 1/4; 1. The last token is not in the scan
    np.testing.assert_allclose(auprc_of(maps, eyes), [(1 + 2 / 3) / 2, 1 / 4, 1])
    expected = [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0.5, 0, 0]]
    np.testing.assert_allclose(usual_place(eyes), expected)


def test_a_deletion_takes_the_first_tokens_of_its_order() -> None:
    order = np.random.default_rng(0).permutation(200)[:100]
    sets = hidden_sets(order, 200)
    assert [int(hidden.sum()) for hidden in sets] == [round(100 * share) for share in SHARES]
    for hidden in sets:
        assert set(np.flatnonzero(hidden)) == set(order[: int(hidden.sum())])


def test_a_deletion_loses_what_its_order_hides_first(tmp_path: Path) -> None:
    """Of a linear head on mean tokens: hiding tokens loses the sum of their parts."""
    cfg = config(tmp_path, tmp_path / "run")
    torch.manual_seed(0)
    view, valid = torch.randn(1, 1, 8, 24, 32), torch.ones(1, 24)
    head, weights = reader(torch.tensor([[0.0] * 4, [1.0, 0, 0, 0]])), against_others(1, 2)
    parts = cheap_map(head, Means()(view), valid, weights)[0].numpy()
    truth = np.arange(24) == 7
    eyes = eyes_of(truth[None], np.ones((1, 24), bool), np.array(["a"]))
    orders = _orders({CONTRIBUTIONS: parts, "against": -parts}, eyes, 0, 0)
    assert set(orders) == {CONTRIBUTIONS, "against", RANDOM_ORDER, TRUTH_ORDER}
    assert orders[TRUTH_ORDER][0] == 7
    arm: Any = SimpleNamespace(encoder=Means(), module=head.module, standardise=None)
    losses = _losses(arm, orders, view, valid, weights, cfg, RUNTIME)
    for name, order in orders.items():
        hidden = [order[: max(1, round(share * 24))] for share in SHARES]
        expected = np.mean([parts[tokens].sum() for tokens in hidden])
        assert losses[name] == pytest.approx(expected, abs=1e-5), name
    assert losses[CONTRIBUTIONS] > max(losses[RANDOM_ORDER], losses[TRUTH_ORDER]) > losses["against"]


def scattered(auprc: dict[tuple[str, str], float], noise: float = 0.02) -> Measured:
    """24 eyes of 12 people whose scores scatter around these."""
    rng = np.random.default_rng(0)
    values = {key: mean + noise * rng.normal(size=24) for key, mean in auprc.items()}
    deletion = {CONTRIBUTIONS: np.full(24, 0.8), RANDOM_ORDER: np.full(24, 0.3)}
    deletion[control_order(CONTRIBUTIONS)] = np.full(24, 0.7)
    return Measured({}, values, np.full(24, 0.05), deletion, {TRAINED: 0.9})


def scores(contributions: float, occlusion: float, control: float, place: float = 0.1) -> Measured:
    content = {(TRAINED, CONTRIBUTIONS): contributions, (TRAINED, OCCLUSION): occlusion}
    for arm in (RANDOM_HEAD, RANDOM_ENCODER):
        content |= {(arm, CONTRIBUTIONS): 0.07, (arm, OCCLUSION): control}
    return scattered(content | {(BRIGHTNESS, ""): 0.1, (PLACE, ""): place})


def verdict_of(measured: Measured) -> dict[str, Any]:
    return judge(measured, PERSON, 400, 0)


def test_the_winner_is_above_chance_and_its_controls() -> None:
    best = verdict_of(scores(0.4, 0.6, 0.07))
    assert (best["method"], best["score"]["beats_chance"]) == (OCCLUSION, True)
    assert best["score"]["auprc"] == pytest.approx(0.6, abs=0.02)
    low, high = best["score"]["ci95"]
    assert low < best["score"]["auprc"] < high
    assert "above a map of where changes usually are" in best["verdict"]
    first, random, control = best["deletion"]
    assert first["above_random"]["mean"] == pytest.approx(0.5)
    assert first["above_control"]["mean"] == pytest.approx(0.1)
    assert random["above_control"] is control["above_control"] is None
    second = verdict_of(
        scores(0.4, 0.6, 0.6)
    )  # a control does as well: occlusion shows the image, not the head
    assert (second["method"], second["score"]["beats_chance"]) == (CONTRIBUTIONS, True)
    below = verdict_of(scores(0.4, 0.3, 0.07, place=0.7))
    assert "below a map of where changes usually are" in below["verdict"]


def test_no_map_beats_chance_is_an_answer() -> None:
    none = verdict_of(scores(0.05, 0.6, 0.6))
    assert (none["method"], none["score"]["beats_chance"]) == (CONTRIBUTIONS, False)
    assert none["verdict"].startswith("No map beats chance")


def test_people_count_once() -> None:
    values, person = np.array([1.0, 1.0, 1.0, 5.0]), np.array(["a", "a", "a", "b"])
    np.testing.assert_allclose(mean_over_people(values, person), [1, 5])


def test_a_score_belongs_to_one_head(tmp_path: Path) -> None:
    (tmp_path / "explanations.json").write_text("{}")
    one: Any = SimpleNamespace(url=f"{tmp_path}/head.pt", checksum="a", state={"head_kind": "attentive"})
    with pytest.raises(UserError, match=r"expected what finetuning\.explain writes, found another file"):
        judgement_of(one, OPTIONS)
    score = {"auprc": 0.5, "ci95": [0.4, 0.6], "chance": 0.1, "n_eyes": 9, "beats_chance": True}
    content = {"head_sha256": "a", "method": OCCLUSION, "score": score}
    (tmp_path / "explanations.json").write_text(json.dumps(content))
    assert judgement_of(one, OPTIONS).method == OCCLUSION
    assert judgement_of(one, OPTIONS).is_validated
    one.checksum = "b"
    other = judgement_of(one, OPTIONS)
    assert (other.method, other.score) == (ATTENTION, None)
    assert other.text.startswith(NOT_JUDGED)
    assert "of another head" in other.text
