"""Settings of the trainer: plain data that crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.actors.replay.record import MAX_LENGTH
from paceline.actors.router.hedge import HedgeSettings
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.topic_schedule import ScheduleSettings

Loss = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "lk_hybrid", "hard_label"]
Weighting = Literal["uniform", "first_rejection", "rejected_only"]
Sampling = Literal["target", "student", "mixed"]
ZeroStage = Literal["auto", 0, 1, 2, 3]


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """The training objective.

    Attributes:
        loss: per position, see losses.py; ``hard_label`` is fine-tuning on the emitted tokens.
        jsd_beta: of ``jsd``, between 0 and 1.
        weighting: ``uniform``; ``first_rejection`` counts a position whose draft token was
            rejected ``rejection_weight`` times; ``rejected_only`` counts no others.
        rejection_weight: above 0.
        sampling: contexts of the target, the student (behind rejected tokens) or both.
        student_share: of the student's positions in ``mixed``, 0 to 1.
    """

    loss: Loss = "forward_kl"
    jsd_beta: float = 0.5
    weighting: Weighting = "uniform"
    rejection_weight: float = 3.0
    sampling: Sampling = "target"
    student_share: float = 0.5

    def __post_init__(self) -> None:
        """Validate words and ranges."""
        for name, known in (("loss", Loss), ("weighting", Weighting), ("sampling", Sampling)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}")
        if not 0.0 < self.jsd_beta < 1.0 or not 0.0 <= self.student_share <= 1.0:
            raise ValueError("jsd_beta and student_share lie between 0 and 1")
        if self.rejection_weight <= 0.0:
            raise ValueError("rejection_weight must be above 0")

    @property
    def needs_branches(self) -> bool:
        """Whether positions behind rejected tokens are used."""
        return self.sampling != "target" and self.weighting != "rejected_only"


@dataclass(frozen=True, slots=True)
class DistillerSettings:
    """Settings of a draft's training.

    Attributes:
        learning_rate: after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        rate_hold_steps: optimizer steps after which the rate decays as one over the steps, to a
            tenth at least; 0 never decays it.
        accumulation: micro-steps per optimizer step.
        weight_decay: AdamW's, of matrices but the embedding. Weights that were trained on a
            stream's first few records learn less from all that comes later (Ash and Adams, arXiv
            1910.08475); decay lets them forget.
        clip: largest norm of a gradient.
        dtype: ``auto`` is bfloat16 if the device is fast in it, else float32.
        device: ``auto`` is the GPU if there is one.
        objective: of training.
        adapter: ``full`` trains every weight, ``lora`` low-rank adapters on the linear layers.
        lora_rank: of an adapter.
        lora_alpha: its scale times its rank.
        lora_embeddings: whether embeddings, and a head tied to them, are adapted too.
        zero_stage: see :func:`paceline.actors.training.deepspeed_config.zero_stage`.
        average_decay: of the running mean of the weights, which is the candidate; 0 takes the last
            weights.
        target_path: folder of the target, of which EAGLE drafts read embedding and head.
    """

    learning_rate: float = 1.5e-3
    warmup_steps: int = 5
    rate_hold_steps: int = 0
    accumulation: int = 1
    weight_decay: float = 0.3
    clip: float = 1.0
    dtype: str = "auto"
    device: str = "auto"
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    adapter: Literal["full", "lora"] = "full"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_embeddings: bool = False
    zero_stage: ZeroStage = "auto"
    average_decay: float = 0.98
    target_path: str | None = None


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """Settings of the scorer; plain data that crosses process borders.

    Attributes:
        draft_paths: expert (topics and ``general``) to the folder of its initial weights.
        fingerprints: expert to the fingerprint of its initial weights and the target.
        hedge: of the weights.
        device: ``auto`` is the GPU if there is one.
        dtype: ``auto`` is bfloat16 if the device is fast in it, else float32.
        micro_batch: records per forward.
        max_length: tokens of a record at most.
        draft_top_k: tokens that the served draft proposes from.
        capacity_bytes: of records in memory, which later versions are scored on.
        retention_s: of a record, seconds.
        state_file: of the gains, without any text; None keeps none.
        poll_s: first delay between two polls for a permit, seconds.
        refresh_s: pause when all is scored, seconds: one weight copy then serves several records.
        rest_s: of an expert that could not be scored, seconds.
        timeout_s: longest wait for another actor, seconds.
        low_priority: run at SCHED_IDLE or nice 19.
        target_path: folder of the target, of which EAGLE drafts read embedding and head.
    """

    draft_paths: dict[str, str]
    fingerprints: dict[str, str]
    hedge: HedgeSettings = field(default_factory=HedgeSettings)
    device: str = "auto"
    dtype: str = "auto"
    micro_batch: int = 8
    max_length: int = MAX_LENGTH
    draft_top_k: int = 64
    capacity_bytes: int = 32 * 2**20
    retention_s: float = 24 * 3600.0
    state_file: str | None = None
    poll_s: float = 0.02
    refresh_s: float = 5.0
    rest_s: float = 30.0
    timeout_s: float = 10.0
    low_priority: bool = True
    target_path: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the trainer; plain data that crosses process borders.

    Attributes:
        draft_paths: expert (topics and ``general``) to the folder of its initial weights.
        distiller: of a draft's training.
        gate: conditions of a publication.
        schedule: of topics.
        num_threads: of torch, for training.
        micro_batch: records per micro-step; ``distiller.accumulation`` of them make a step.
        round_seconds: training time (micro-steps alone) of a round, see
            :func:`paceline.actors.training.topic_schedule.round_length`.
        max_round_s: longest wall time of a round; a busy server makes rounds long.
        train_records: training records of a round.
        held_out_records: held-out records of an evaluation, at most.
        max_length: tokens of a record at most, and the draft's own limit; what is longer is cut.
        draft_top_k: tokens that the served draft proposes from.
        report_losses: whether to send shards the loss of each record, for sampling or removal by
            priority.
        poll_s: first delay between two polls for a permit, seconds.
        refresh_s: pause while no topic is ready, seconds.
        timeout_s: longest wait for another actor, seconds.
        low_priority: run at SCHED_IDLE or nice 19.
        optimizer_dir: folder of optimizer checkpoints, one per publication; None writes none, and
            a restarted trainer's optimizer starts fresh.
        ranks: processes that train a draft together, the trainer included.
        group_timeout_s: of a collective call, seconds.
        seed: of batch order; None is unseeded.
    """

    draft_paths: dict[str, str]
    distiller: DistillerSettings = field(default_factory=DistillerSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    num_threads: int = 1
    micro_batch: int = 8
    round_seconds: float = 8.0
    max_round_s: float = 45.0
    train_records: int = 256
    held_out_records: int = 128
    max_length: int = MAX_LENGTH
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
