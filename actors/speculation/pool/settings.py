"""Settings of an expert's replica."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool.draft_ahead import DraftAheadMode


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How one replica of an expert drafts.

    Attributes:
        expert: one of the target's drafts.
        target: settings of the targets that it drafts for.
        max_sequences: over all targets.
        other_cores: cores on which the pool's other processes draft.
        device: of the expert.
        gpu_share: of the memory of a GPU, for the expert's process.
        num_threads: torch threads of its forwards.
        draft_ahead: see DraftAheadPolicy.
        across_nodes: whether targets of other nodes connect too.
        autoscaled: whether the number of replicas may change, so that they share sessions.
    """

    expert: str
    target: TargetSettings
    max_sequences: int
    other_cores: int = 0
    device: str = "auto"
    gpu_share: float = 1.0
    num_threads: int = 1
    draft_ahead: DraftAheadMode = "auto"
    across_nodes: bool = False
    autoscaled: bool = False

    @property
    def num_targets(self) -> int:
        """Targets that it drafts for."""
        return math.ceil(self.max_sequences / self.target.max_num_seqs)
