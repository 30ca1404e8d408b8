"""How drafts are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.actors.training.objective_settings import ObjectiveSettings
from paceline.actors.training.stages import ZeroStage


@dataclass(frozen=True, slots=True)
class DistillerSettings:
    """How a draft is trained.

    Attributes:
        learning_rate: after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        rate_hold_steps: optimizer steps after which the rate falls as one over the steps, to a
            tenth at least; 0 holds it for ever.
        accumulation: micro-steps per optimizer step.
        weight_decay: AdamW's, of matrices but the embedding. A stream begins with few records
            that are learnt from again and again; weights that grew on them learn less from all that
            comes later (Ash and Adams, arXiv 1910.08475), and decay lets them forget.
        clip: largest norm of a gradient.
        dtype: ``auto`` is bfloat16 where the device computes in it, else float32.
        device: ``auto`` is the GPU where there is one.
        objective: what training minimises.
        adapter: ``full`` trains every weight, ``lora`` low-rank adapters on the linear layers.
        lora_rank: of an adapter.
        lora_alpha: its scale times its rank.
        lora_embeddings: whether embeddings, and a head tied to them, are adapted too.
        zero_stage: see :func:`paceline.actors.training.stages.zero_stage`.
        average_decay: of the running mean of the weights, which is what a candidate consists of;
            0 takes the weights as the last step left them.
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
