"""What an update of a decoder's training moves, and how the training goes on after a kill.

In: a decoder, and its encoder where that is trained too; what was kept of the arms that are finished. Out:
`Moving`: AdamW on them, and the weights that are judged; `Keeper`: checkpoints in train.ckpt_dir, named by
the updates of all arms, and the newest one of the same run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from finetuning.cohort.source import Source
from finetuning.dense.decoder import UNETR
from finetuning.dense.folds import DenseVolumes
from finetuning.features.yardsticks import LocalTokens
from finetuning.heads.epochs import newest_of_run
from finetuning.heads.tuning import layer_groups
from models.vit3d import VisionTransformer3D
from utils.config.load import to_yaml
from utils.config.schema import Config
from utils.run.checkpoints import Checkpoints
from utils.run.lease import Lease
from utils.runtime.single import Runtime

LONGEST_AVERAGE = 0.99  # of the weights that are judged: the share of what was before
Encoder = VisionTransformer3D | LocalTokens
KIND = "dense"  # of a checkpoint


@dataclass
class Moving:
    """What an update moves. With a frozen encoder a running mean of the decoder's weights is judged."""

    encoder: Encoder
    decoder: nn.Module
    optimizer: torch.optim.AdamW
    average: AveragedModel | None
    is_trained: bool  # the encoder

    @classmethod
    def of(cls, cfg: Config, encoder: Encoder, decoder: nn.Module) -> Moving:
        """AdamW, weight decay of matrices only; decoder and a trained encoder's last block at full rate."""
        is_trained, optim = cfg.finetune.encoder == "trained", cfg.optim
        body = encoder if is_trained and isinstance(encoder, VisionTransformer3D) else None
        groups = layer_groups(body, decoder, optim.weight_decay, cfg.finetune.layer_decay)
        optimizer = torch.optim.AdamW(groups, lr=optim.base_lr, betas=optim.betas, eps=optim.eps)
        has_mean = cfg.head.kind == UNETR and not is_trained
        average = AveragedModel(decoder, avg_fn=_averaged) if has_mean else None
        return cls(encoder, decoder, optimizer, average, is_trained)

    @property
    def judged(self) -> nn.Module:
        return self.decoder if self.average is None else self.average.module

    def copies(self) -> tuple[nn.Module, nn.Module]:
        return copy.deepcopy(self.encoder) if self.is_trained else self.encoder, copy.deepcopy(self.judged)

    def parts(self) -> dict[str, Any]:
        values = {"decoder": self.decoder, "optimizer": self.optimizer, "average": self.average}
        values |= {"encoder": self.encoder if self.is_trained else None}
        return {name: value for name, value in values.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.parts().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, value in self.parts().items():
            value.load_state_dict(state[name])

    def update(self, rate: float, clip: float) -> None:
        moved = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(moved, clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_share"]
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.decoder)


def _averaged(average: Tensor, value: Tensor, count: Tensor | int) -> Tensor:
    """Weights averaged over the last updates: over all of them at first, over about a hundred later."""
    return torch.lerp(value, average, min(LONGEST_AVERAGE, float(count / (count + 10))))


class Keeper:
    """Writes the checkpoints of one run, and knows where it is to go on."""

    def __init__(
        self, source: Source, volumes: DenseVolumes, runtime: Runtime, total: int, leases: list[Lease]
    ) -> None:
        self.source, self.total = source, total
        self.volumes = volumes_checksum(volumes)
        self.state = self._restored()
        self.step: int = self.state["step"]  # updates of all arms
        self._arm: Callable[[], dict[str, Any]] = dict
        self.checkpoints = Checkpoints(source.cfg, runtime, self, self._content, total + 1, leases)

    def of_arm(self, name: str) -> dict[str, Any] | None:
        """The state of an arm, whether it is finished or not; None where it has not begun."""
        return self.state["arms"].get(name)

    def enter(self, name: str, state: Callable[[], dict[str, Any]]) -> None:
        """From now on the arm `name` is trained, and `state` gives its own."""
        self._arm = lambda: {name: state()}

    def leave(self, name: str, trained: dict[str, Any]) -> None:
        self.state["arms"][name] = {"trained": trained}
        self._arm = dict
        self.save()

    def save(self) -> None:
        self.checkpoints.save([], with_step=True)

    def _content(self) -> dict[str, Any]:
        cfg = self.source.cfg
        return {
            "kind": KIND,
            "step": self.step,
            "arms": self.state["arms"] | self._arm(),
            "config": to_yaml(cfg),
            "encoder_checksum": self.source.state["checksum"],
            "volumes_sha256": self.volumes,
            "total_steps": self.total,
        }

    def _restored(self) -> dict[str, Any]:
        """The newest intact checkpoint of this run, or one of step 0. Raises UserError for another run's."""
        source, cfg = self.source, self.source.cfg

        def expected_of(state: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
            updates = f"a run of {state['total_steps']} updates, which its rates rest on,"
            return {
                "total_steps": (self.total, updates),
                "encoder_checksum": (source.state["checksum"], f"the checkpoint {source.url}"),
                "volumes_sha256": (self.volumes, f"the labelled volumes of {cfg.data.store}"),
            }

        state = newest_of_run(cfg, KIND, ("decoders", "another training"), expected_of)
        return {"step": 0, "arms": {}} if state is None else state


def volumes_checksum(volumes: DenseVolumes) -> str:
    """Which volumes are trained and validated on, with which labels."""
    facts = volumes.facts().loc[volumes.rows].to_numpy(str).tolist()
    return hashlib.sha256(repr((facts, volumes.fold.tolist(), volumes.names)).encode()).hexdigest()
