"""What the scorer works by."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.routing.hedge import HedgeSettings


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """How experts are scored; plain data that crosses process borders.

    Attributes:
        draft_paths: expert (topics and ``general``) to the folder of its initial weights.
        marks: expert to the fingerprint of its initial weights and the target.
        hedge: how scores become weights.
        device: of the scoring; ``auto`` is the GPU where there is one.
        dtype: of the scoring; ``auto`` is bfloat16 where the device computes in it.
        micro_batch: records per forward.
        max_length: tokens of a record at most.
        draft_top_k: tokens that the served draft proposes from.
        capacity_bytes: of records that wait in memory, for later versions to be scored on.
        retention_s: how long one waits at most.
        state_file: where gains outlive the process; None keeps nothing. No text is in it.
        poll_s: pause between two questions for leave, seconds.
        refresh_s: pause when all is scored, seconds: records gather meanwhile, and a weight copy
            serves several.
        rest_s: pause after an expert could not be scored, seconds.
        timeout_s: longest wait for another actor, seconds.
        low_priority: run at SCHED_IDLE or nice 19.
    """

    draft_paths: dict[str, str]
    marks: dict[str, str]
    hedge: HedgeSettings = field(default_factory=HedgeSettings)
    device: str = "auto"
    dtype: str = "auto"
    micro_batch: int = 8
    max_length: int = 512
    draft_top_k: int = 64
    capacity_bytes: int = 32 * 2**20
    retention_s: float = 24 * 3600.0
    state_file: str | None = None
    poll_s: float = 0.02
    refresh_s: float = 5.0
    rest_s: float = 30.0
    timeout_s: float = 10.0
    low_priority: bool = True
