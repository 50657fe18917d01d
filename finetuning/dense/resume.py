"""How a training of decoders goes on after a kill: its checkpoints.

In: the state of the arm that is trained, and what was kept of those that are finished. Out: checkpoints in
train.ckpt_dir, named by the updates of all arms; the newest one of the same run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from finetuning.cohort.source import Source
from finetuning.dense.folds import DenseVolumes
from utils.checkpoint import CheckpointError, load_newest
from utils.config.load import config_of_yaml, to_yaml
from utils.config.schema import keys_with
from utils.errors import UserError
from utils.run.checkpoints import Checkpoints
from utils.run.folder import refuse_changes, refuse_lost_checkpoints
from utils.run.lease import Lease
from utils.runtime.single import Runtime, StopRequested

KIND = "dense"  # of a checkpoint
log = logging.getLogger(__name__)


class Keeper:
    """Writes the checkpoints of one run, and knows where it is to go on."""

    def __init__(
        self, source: Source, volumes: DenseVolumes, runtime: Runtime, total: int, leases: list[Lease]
    ) -> None:
        self.source, self.runtime, self.total = source, runtime, total
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
        """The arm is finished; what was kept of it."""
        self.state["arms"][name] = {"trained": trained}
        self._arm = dict
        self.save()

    def save(self) -> None:
        self.checkpoints.save([], with_step=True)

    def stop_if_asked(self) -> None:
        """Raise StopRequested after SIGTERM or Ctrl-C."""
        if self.runtime.stop_requested:
            raise StopRequested

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
        cfg = self.source.cfg
        where = str(cfg.train.ckpt_dir)
        state = load_newest(where, cfg.data.storage_options)
        if state is None:
            refuse_lost_checkpoints(cfg)
            return {"step": 0, "arms": {}}
        if state.get("kind") != KIND:
            raise CheckpointError(
                f"{where}: expected checkpoints of decoders, found those of another training"
            )
        began_as = config_of_yaml(state["config"], where, to_go_on=True)
        refuse_changes(began_as, cfg, where, moved=keys_with("is_place"))
        expected = {
            "total_steps": (self.total, f"a run of {state['total_steps']} updates, which its rates rest on,"),
            "encoder_checksum": (self.source.state["checksum"], f"the checkpoint {self.source.url}"),
            "volumes_sha256": (self.volumes, f"the labelled volumes of {cfg.data.store}"),
        }
        for key, (value, text) in expected.items():
            if state[key] != value:
                raise UserError(
                    f"{where}: expected {text} as the run began, found another; use another run.dir"
                )
        log.info("resuming from step %d of %s", state["step"], where)
        return state


def volumes_checksum(volumes: DenseVolumes) -> str:
    """Which volumes are trained and validated on, with which labels."""
    facts = volumes.facts().loc[volumes.rows].to_numpy(str).tolist()
    return hashlib.sha256(repr((facts, volumes.fold.tolist(), volumes.names)).encode()).hexdigest()
