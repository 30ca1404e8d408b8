"""Settings of the trainer: plain data that crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.training.distiller_settings import DistillerSettings
from paceline.actors.training.drift import DriftSettings
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.schedule import ScheduleSettings


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How the trainer works.

    Attributes:
        draft_paths: expert (topics and ``general``) to the folder of its initial weights.
        distiller: how a draft is trained.
        gate: when a candidate is published.
        schedule: which topic is next.
        drift: when live acceptance has fallen.
        num_threads: of torch, for training.
        micro_batch: records per micro-step; ``distiller.accumulation`` of them make a step.
        round_seconds: training time (micro-steps alone) of a round; less while the topic drifts or
            the server is busy, see ``schedule.round_length``.
        max_round_s: longest wall time of a round; a busy server makes rounds long.
        train_records: records drawn for a round.
        held_out_records: records that judge at most.
        max_length: tokens of a record at most; the draft's own limit where that is less. What
            is longer is cut.
        draft_top_k: tokens that the served draft proposes from.
        report_losses: tell shards the loss on each record, which those that draw or remove by
            priority need.
        poll_s: pause between two questions for leave, seconds.
        refresh_s: pause between two looks at the shards while no topic is ready, seconds.
        timeout_s: longest wait for another actor, seconds.
        low_priority: run at SCHED_IDLE or nice 19.
        optimizer_dir: folder that keeps the optimizer's state at each publication; None keeps
            none, and a restarted trainer's moments start anew.
        ranks: processes that train a draft together, the trainer counted in.
        group_timeout_s: longest wait of one rank for the others, seconds.
        seed: of batch order; None is unseeded.
    """

    draft_paths: dict[str, str]
    distiller: DistillerSettings = field(default_factory=DistillerSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    drift: DriftSettings = field(default_factory=DriftSettings)
    num_threads: int = 1
    micro_batch: int = 8
    round_seconds: float = 8.0
    max_round_s: float = 45.0
    train_records: int = 256
    held_out_records: int = 256
    max_length: int = 512
    draft_top_k: int = 64
    report_losses: bool = False
    poll_s: float = 0.02
    refresh_s: float = 1.0
    timeout_s: float = 10.0
    low_priority: bool = True
    optimizer_dir: str | None = None
    ranks: int = 1
    group_timeout_s: float = 120.0
    seed: int | None = None
