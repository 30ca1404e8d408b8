"""The distiller: a draft under DeepSpeed that learns the target's recorded distributions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.actors.decoding.loading import resolve_device, resolve_dtype
from paceline.actors.training.batches import Batch
from paceline.actors.training.forward import logits_at, takes_branches
from paceline.actors.training.objective import objective
from paceline.actors.training.objective_settings import ObjectiveSettings
from paceline.actors.training.optimizer_state import OptimizerState, capture, restore

logger = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True)
class DistillerSettings:
    """How a draft is trained.

    Attributes:
        learning_rate: constant after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        accumulation: micro-steps per optimizer step.
        clip: largest norm of a gradient.
        dtype: ``auto`` is bfloat16 where the device computes in it, else float32.
        device: ``auto`` is the GPU where there is one.
        objective: what training minimises.
    """

    learning_rate: float = 1.5e-3
    warmup_steps: int = 5
    accumulation: int = 1
    clip: float = 1.0
    dtype: str = "auto"
    device: str = "auto"
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)


@dataclass(frozen=True, slots=True)
class MicroStep:
    """What a micro-step reports: means over its positions, and over those of each record."""

    loss: float
    expected_acceptance: float
    positions: int
    record_losses: tuple[float, ...] = ()


class _Lesson(nn.Module):
    """The draft with its loss, as the one module that DeepSpeed drives."""

    def __init__(self, draft: nn.Module, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.draft = draft
        self._settings = settings

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        goal = objective(logits_at(self.draft, batch), batch, self._settings)
        return goal.loss, goal.expected_acceptance, goal.per_record


class Distiller:
    """One topic's candidate: a DeepSpeed engine around a draft, with AdamW handed in.

    ZeRO stage 1 for bfloat16 (it keeps float32 masters; stage 0 diverges in it), stage 0 for
    float32. Weights go in and out as state dicts, never as checkpoint files.
    """

    def __init__(self, path: str, settings: DistillerSettings) -> None:
        """Load the draft's folder and build the engine.

        Args:
            path: folder of a causal LM; its weights are where training starts.
            settings: see DistillerSettings.

        Raises:
            OSError: where the folder holds no model.
        """
        self._path = path
        self.settings = settings
        self.device = resolve_device(settings.device)
        self.dtype = _dtype(settings.dtype, self.device)
        draft = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=self.dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
        )
        self.branches = settings.objective.needs_branches and takes_branches(draft)
        if settings.objective.needs_branches and not self.branches:
            logger.warning(
                "%s: a %s cannot learn behind rejected tokens; it learns where it proposed",
                path,
                draft.config.model_type,
            )
        self.vocab_size = int(draft.config.vocab_size)
        self.max_length = int(draft.config.max_position_embeddings)
        self._initial = {k: v.detach().clone() for k, v in draft.state_dict().items()}
        self._engine: Any = None
        self._build(draft)

    def _build(self, draft: Any) -> None:
        import deepspeed  # late: it looks at the environment, and takes seconds

        lesson = _Lesson(draft.to(self.device).train(), self.settings.objective)
        optimizer = torch.optim.AdamW(
            lesson.parameters(),
            lr=self.settings.learning_rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._warmup)
        self._engine, *_ = deepspeed.initialize(
            model=lesson,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=engine_config(self.settings, self.dtype),
            dist_init_required=True,
        )

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / max(self.settings.warmup_steps, 1))

    def micro_step(self, batch: Batch) -> MicroStep:
        """Learn from a batch; every ``accumulation``-th call moves the weights."""
        engine = self._engine
        engine.train()
        loss, acceptance, per_record = engine(batch.to(self.device))
        engine.backward(loss)
        engine.step()
        return MicroStep(
            float(loss.detach()), float(acceptance), batch.num_positions, tuple(per_record.tolist())
        )

    @property
    def steps(self) -> int:
        """Optimizer steps since the last :meth:`reset`."""
        return int(self._engine.global_steps)

    def reset(self, state: Mapping[str, Tensor] | None) -> None:
        """Start again from these weights, None being the initial ones, with a fresh optimizer."""
        draft = self._engine.module.draft
        load_state(draft, self._initial if state is None else state)
        self._engine.destroy()
        self._build(draft)

    def optimizer_state(self) -> OptimizerState:
        """Copies of what training needs beside the weights: float32 masters, moments, steps."""
        return capture(self._engine.basic_optimizer, self.steps)

    def resume(self, state: OptimizerState) -> None:
        """Go on where :meth:`optimizer_state` was taken; the weights must be those of then.

        Raises:
            ValueError: for tensors of another draft or dtype; nothing has changed then.
        """
        restore(self._engine.basic_optimizer, state)
        schedule = self._engine.lr_scheduler
        schedule.last_epoch = self._engine.global_steps = state.steps
        for group in self._engine.basic_optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._warmup(state.steps)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the candidate's weights under the draft's own names, in bfloat16.

        Weights that are tied to another appear once.
        """
        draft = self._engine.module.draft
        tied = set(getattr(draft, "_tied_weights_keys", None) or ())
        if not getattr(draft.config, "tie_word_embeddings", False):
            tied = set()
        return {
            name: tensor.detach().to("cpu", torch.bfloat16, copy=True)
            for name, tensor in draft.state_dict().items()
            if name not in tied
        }

    def served(self, state: Mapping[str, Tensor] | None) -> Any:
        """A draft of its own, in eval mode, with these weights (None: the initial ones)."""
        draft = AutoModelForCausalLM.from_config(
            self._engine.module.draft.config, attn_implementation="eager"
        ).to(self.device, self.dtype)
        load_state(draft, self._initial if state is None else state)
        return draft.eval().requires_grad_(False)


def load_state(draft: Any, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a draft, in place.

    Raises:
        ValueError: for names that the draft lacks or shapes that differ.
    """
    own = draft.state_dict()
    tied = set(getattr(draft, "_tied_weights_keys", None) or ())
    missing = [name for name in own if name not in state and name not in tied]
    wrong = [n for n, new in state.items() if n not in own or own[n].shape != new.shape]
    if missing or wrong:
        raise ValueError(f"weights do not fit the draft: missing {missing}, wrong {wrong}")
    with torch.no_grad():
        for name, new in state.items():
            own[name].copy_(new)


def engine_config(settings: DistillerSettings, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    half = dtype == torch.bfloat16
    return {
        "train_micro_batch_size_per_gpu": 1,  # batches are made by hand: this only must be there
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": half},
        "zero_optimization": {"stage": 1 if half else 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    """As the target resolves it, less float16, which would need a loss scale."""
    if dtype == "auto":
        return resolve_dtype(dtype, device)
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
