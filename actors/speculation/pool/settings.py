"""Settings of the pool: plain data that crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool.draft_ahead import DraftAhead


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How one replica of an expert drafts.

    ``target`` are the settings of the targets that it drafts for, among whose drafts is
    ``expert``. ``max_sequences`` is over all targets, which together compute on ``target_cores``.
    ``other_cores`` are what the pool's other processes draft on. ``across_nodes`` lets targets of
    other nodes connect too. ``scaled``: the number of replicas may change, and they share.
    """

    expert: str
    target: TargetSettings
    max_sequences: int
    target_cores: int
    other_cores: int = 0
    device: str = "auto"
    num_threads: int = 1
    draft_ahead: DraftAhead = "auto"
    across_nodes: bool = False
    scaled: bool = False
