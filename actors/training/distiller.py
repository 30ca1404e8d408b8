"""The distiller: trains a draft under DeepSpeed on the target's recorded distributions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.actors.engine.model_loader import load_tokenizer, resolve_device
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.adapters import Adapters, load_state
from paceline.actors.training.batches import Batch, plain_tokens
from paceline.actors.training.deepspeed_config import engine_config, training_dtype, zero_stage
from paceline.actors.training.eagle import FULL, STEPS, Effort, eagle_objective
from paceline.actors.training.forward import (
    load_trainable,
    logits_at,
    takes_branches,
    trains_on,
)
from paceline.actors.training.losses import objective
from paceline.actors.training.optimizer_state import (
    OptimizerState,
    capture,
    parameter_groups,
    part,
    restore,
    whole,
)
from paceline.actors.training.settings import DistillerSettings, ObjectiveSettings
from paceline.actors.training.shares import Share, make_shares
from paceline.actors.weights.checkpoint import tied_names
from paceline.actors.weights.eagle import BASIS, VOCABULARY, Draft, EagleDraft, published_dtype
from paceline.actors.weights.target_ends import SharedEmbedding, share_ends

_STEPS = "steps"


class RunningMean:
    """Exponential moving average of some weights, in float32 beside them.

    After step t (from 1) the mean moves towards the weights by ``1 - min(decay, (1 + t) /
    (10 + t))``: a fresh mean forgets its start within a few steps.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        """Start at the weights.

        Args:
            weights: in training, of any floating dtype; they are not kept.
            decay: share of the mean that a step keeps, in [0, 1); 0 is the weights themselves.
        """
        self._decay = decay
        self._steps = 0
        self._means = [weight.detach().float().clone() for weight in weights]

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Take the weights after an optimizer step."""
        self._steps += 1
        keep = min(self._decay, (1 + self._steps) / (10 + self._steps))
        now = [weight.detach().float() for weight in weights]
        torch._foreach_lerp_(self._means, now, 1.0 - keep)

    @contextmanager
    def in_place(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Put the means into the weights, rounded to their dtype, until the block ends."""
        with torch.no_grad():
            kept = [weight.detach().clone() for weight in weights]
            for weight, mean in zip(weights, self._means, strict=True):
                weight.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, kept, strict=True):
                    weight.copy_(old)

    def state(self) -> dict[str, Tensor]:
        """The state for :meth:`resume`; the next update changes its tensors."""
        means = {str(number): mean for number, mean in enumerate(self._means)}
        return means | {_STEPS: torch.tensor(self._steps)}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of weights of the same shapes."""
        self._steps = int(state[_STEPS])
        for number, mean in enumerate(self._means):
            mean.copy_(state[str(number)])

    def nbytes(self) -> int:
        """Bytes of the means."""
        return sum(mean.nbytes for mean in self._means)


logger = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
# Of an EAGLE draft's vocabulary, on CPUs: what a draft learns is the same, a step takes 0.6 of the
# time. On GPUs its head is no cost.
_TOKENS = 1024
_LEAST_RATE = 0.1
# Prefixes in an optimizer state: weights that are not among the published ones, and the mean.
_WEIGHT, _MEAN = "weight.", "mean."


@dataclass(frozen=True, slots=True)
class MicroStep:
    """Result of a micro-step: means over its positions, and over those of each record."""

    loss: float
    expected_acceptance: float
    positions: int
    record_losses: tuple[float, ...] = ()


class _DraftWithLoss(nn.Module):
    """The draft with its loss, as one module for DeepSpeed."""

    def __init__(self, draft: nn.Module, settings: ObjectiveSettings, effort: Effort) -> None:
        super().__init__()
        self.draft = draft
        self.effort = effort
        self._settings = settings

    def forward(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self.draft, EagleDraft):
            goal = eagle_objective(self.draft, batch, self._settings, weights, self.effort)
        else:
            goal = objective(logits_at(self.draft, batch), batch, self._settings, weights)
        return goal.loss, goal.expected_acceptance, goal.per_record


class Distiller:
    """A DeepSpeed engine around a draft, with AdamW.

    Weights go in and out as state dicts, with adapters as merged ones: the initial weights are
    frozen below the adapters, until :meth:`reset` loads others.

    Attributes:
        path: folder of the draft.
        settings: see DistillerSettings.
        device: of training.
        dtype: of the weights.
        stage: of ZeRO.
        branches: whether positions behind rejected tokens are used.
        vocab_size: of the draft.
        max_length: of the draft's positions.
        rate_share: share of the learning rate, in (0, 1].
    """

    def __init__(self, path: str, settings: DistillerSettings) -> None:
        """Load the draft's folder and build the engine.

        Args:
            path: folder of a causal LM with the initial weights.
            settings: see DistillerSettings.

        Raises:
            OSError: the folder holds no model.
            ModelError: a tensor is missing or of another shape.
            ValueError: the ZeRO stage cannot work, or the draft has no linear layers to adapt.
        """
        self.path = path
        self.settings = settings
        self.device = resolve_device(settings.device)
        self.dtype = training_dtype(settings.dtype, self.device)
        self.stage = zero_stage(settings.zero_stage, self.dtype)
        draft = load_trainable(path, settings.target_path, self.dtype, self.device)
        self.branches = settings.objective.needs_branches and takes_branches(draft)
        if settings.objective.needs_branches and not self.branches:
            logger.warning(
                "%s: a %s cannot learn behind rejected tokens; it learns at drafted positions",
                path,
                draft.config.model_type,
            )
        self.vocab_size = int(draft.config.vocab_size)
        self.max_length = int(draft.config.max_position_embeddings)
        self._initial = {k: v.detach().clone() for k, v in draft.state_dict().items()}
        self._rng = np.random.default_rng(0)
        self._engine: Any = None
        self._adapters: Adapters | None = None
        self._mean: RunningMean | None = None
        self.rate_share = 1.0
        self._rate_since = 0  # step at which the schedule was restarted
        self._build(draft)

    def _build(self, draft: Draft) -> None:
        import deepspeed  # late: it reads the environment, and takes seconds

        self._rate_since = 0
        effort = Effort(STEPS, _TOKENS, self._rng) if self.device.type == "cpu" else FULL
        module = _DraftWithLoss(draft.to(self.device).train(), self.settings.objective, effort)
        if self.settings.adapter == "lora":
            own = self.settings
            self._adapters = Adapters(
                draft, own.lora_rank, own.lora_alpha, embeddings=own.lora_embeddings
            )
        optimizer = torch.optim.AdamW(
            self._groups(draft),
            lr=self.settings.learning_rate,
            betas=_BETAS,
            # one pass over weights and moments; on GPUs it would need the step count on the device
            fused=True if self.device.type == "cpu" else None,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=engine_config(
                accumulation=self.settings.accumulation,
                clip=self.settings.clip,
                dtype=self.dtype,
                stage=self.stage,
            ),
            dist_init_required=True,
        )
        self._start_mean()

    def _start_mean(self) -> None:
        decay = self.settings.average_decay
        weights = self._trained(self._engine.module.draft)
        self._mean = RunningMean(weights, decay) if decay else None

    def _trained(self, draft: Draft) -> list[Tensor]:
        return list(self._adapters.parameters() if self._adapters else draft.parameters())

    def _groups(self, draft: Draft) -> list[dict[str, Any]]:
        return parameter_groups(draft, self._trained(draft), self.settings.weight_decay)

    def nbytes(self) -> tuple[int, int, int]:
        """Bytes of weights (with the running mean), gradients, and float32 masters and moments."""
        draft = self._engine.module.draft
        trained = self._trained(draft)
        weights = sum(weight.nbytes for weight in draft.parameters())
        weights += self._mean.nbytes() if self._mean else 0
        # float32 weights are their own masters without ZeRO
        masters = 4 if self.stage or self.dtype == torch.bfloat16 else 0
        optimizer = sum((8 + masters) * weight.numel() for weight in trained)
        return weights, sum(weight.nbytes for weight in trained), optimizer

    def _numels(self) -> list[int]:
        """Elements of each of the optimizer's groups."""
        groups = self._groups(self._engine.module.draft)
        return [sum(weight.numel() for weight in group["params"]) for group in groups]

    def _rate(self, step: int) -> float:
        """The learning-rate schedule: a step's factor."""
        warm = min(1.0, (step + 1) / max(self.settings.warmup_steps, 1))
        hold, since = self.settings.rate_hold_steps, step - self._rate_since
        fallen = max(hold / since, _LEAST_RATE) if 0 < hold < since else 1.0
        return self.rate_share * warm * fallen

    def refresh_rate(self) -> None:
        """Restart the schedule after its warm-up: the full rate, then the decay."""
        self._rate_since = self.steps

    def scale_rate(self, share: float) -> None:
        """Scale the learning rate by a share in (0, 1], from the next step but one on."""
        self.rate_share = share

    def set_effort(self, effort: Effort) -> None:
        """Compute so much of an EAGLE objective, until the next :meth:`reset`."""
        self._engine.module.effort = effort

    def micro_step(self, batch: Batch) -> MicroStep:
        """Learn from a whole batch; every ``accumulation``-th call moves the weights."""
        return self.learn(make_shares([batch], self.settings.objective)[0])

    @property
    def micro_steps_left(self) -> int:
        """Micro-steps until the weights move."""
        return (
            self.settings.accumulation - int(self._engine.micro_steps) % self.settings.accumulation
        )

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        """Run a micro-step on this rank's share of a batch; returns figures of the whole batch.

        The loss is the weighted mean over positions.

        Args:
            share: see Share.
            before_step: called between the gradients and the step that moves the weights; may
                wait, or raise: the step is still done.
        """
        engine, batch, before = self._engine, share.batch, self.steps
        engine.train()
        loss, acceptance, per_record = engine(batch.to(self.device), share.weights.to(self.device))
        # DeepSpeed averages the ranks' gradients; the batch has their sum
        engine.backward(loss * engine.world_size)
        try:
            if self.micro_steps_left == 1:
                before_step()
        finally:
            engine.step()
            if self._mean is not None and self.steps > before:
                self._mean.update(self._trained(engine.module.draft))
        figures = torch.zeros(4 + share.total_records, device=self.device)
        figures[0], figures[1] = loss.detach(), share.weights.sum()
        if len(share.places):
            emitted = int((~batch.branch).sum())
            figures[2:4] = torch.stack([acceptance * emitted, acceptance.new_tensor(emitted)])
            figures[4 + share.places.to(self.device)] = per_record.float()
        if engine.world_size > 1:
            torch.distributed.all_reduce(figures)
        whole_loss, weight, accepted, emitted, *per_record = figures.tolist()
        mean = whole_loss / weight if weight else whole_loss
        return MicroStep(mean, accepted / emitted, share.total_positions, tuple(per_record))

    @property
    def steps(self) -> int:
        """Optimizer steps since the last :meth:`reset`."""
        return int(self._engine.global_steps)

    def reset(self, state: Mapping[str, Tensor] | None) -> None:
        """Start again from these weights (None: the initial ones) with a fresh optimizer.

        Raises:
            ValueError: the weights are of another draft; nothing has changed.
        """
        draft = self._engine.module.draft
        load_state(draft, self._initial if state is None else state)
        # Gradients of an incomplete step are of other weights, or not finite.
        draft.zero_grad(set_to_none=True)
        if self._adapters is not None:
            self._adapters.remove()
        self._engine.destroy()
        self._build(draft)

    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer state: float32 masters, moments, steps.

        With adapters it includes their weights and those below, with a running mean that and the
        weights: the published ones are merged or averaged.
        """
        return self.live_state().copied()

    def live_state(self) -> OptimizerState:
        """As :meth:`optimizer_state`, of live tensors: the next step changes them.

        None is copied if one rank trains alone.
        """
        state = capture(self._engine.basic_optimizer, self.steps)
        if self.stage:
            state = whole(state, self._numels(), self.device)
        state.tensors.update(self._unpublished())
        return replace(state, rate_share=self.rate_share)

    def _unpublished(self) -> dict[str, Tensor]:
        """Tensors that are neither published nor masters, by their names in an optimizer state."""
        unpublished: dict[str, Tensor] = {}
        if self._adapters is not None or self._mean is not None:
            groups = self._engine.basic_optimizer.param_groups
            masters = {weight.data_ptr() for group in groups for weight in group["params"]}
            unpublished = {
                _WEIGHT + name: tensor
                for name, tensor in self._own_names().items()
                if tensor.data_ptr() not in masters
            }
        if self._mean is not None:
            unpublished |= {_MEAN + name: tensor for name, tensor in self._mean.state().items()}
        return unpublished

    def resume(self, state: OptimizerState) -> None:
        """Load a state of :meth:`optimizer_state`; the weights must be those of its time.

        Raises:
            ValueError: the state is of another draft, adapter or dtype, or lacks the mean; nothing
                has changed.
        """
        extra = {n: t for n, t in state.tensors.items() if n.startswith((_WEIGHT, _MEAN))}
        kept = OptimizerState(
            {n: t for n, t in state.tensors.items() if n not in extra}, state.steps
        )
        wanted = {name: tensor.shape for name, tensor in self._unpublished().items()}
        if wanted != {name: tensor.shape for name, tensor in extra.items()}:
            raise ValueError("the optimizer's state is of another adapter or mean")
        optimizer = self._engine.basic_optimizer
        restore(optimizer, part(kept, optimizer, self._numels()) if self.stage else kept)
        with torch.no_grad():
            for name, tensor in self._own_names().items():
                if _WEIGHT + name in extra:
                    tensor.copy_(extra[_WEIGHT + name])
        if self._mean is not None:
            self._mean.resume({n.removeprefix(_MEAN): t for n, t in extra.items()})
        self.rate_share = state.rate_share
        schedule = self._engine.lr_scheduler
        schedule.last_epoch = self._engine.global_steps = state.steps
        for group in optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate(state.steps)

    def _own_names(self) -> dict[str, Tensor]:
        """The weights of draft and adapters, without those tied to another."""
        draft = self._engine.module.draft
        tied = tied_names(draft)
        return {name: t for name, t in draft.state_dict().items() if name not in tied}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the candidate's weights by the draft's names, in bfloat16, tied ones once.

        The basis of an EAGLE draft is not known: see ``EagleDraft.basis``.
        """
        draft = self._engine.module.draft
        with self._mean.in_place(self._trained(draft)) if self._mean else nullcontext():
            merged = self._adapters.merged() if self._adapters else draft.state_dict()
            tied = tied_names(draft)
            found = {
                name: tensor.detach().to("cpu", published_dtype(tensor), copy=True)
                for name, tensor in merged.items()
                if name not in tied
            }
        if BASIS in found:
            found[BASIS].zero_()
        return found

    def halfway(
        self, state: Mapping[str, Tensor], served: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The mean of the candidate's weights and served ones (None: the initial ones)."""
        other = self._initial if served is None else served
        found = dict(state)
        for name in state.keys() - {BASIS, VOCABULARY}:
            own = state[name]
            found[name] = own.float().lerp(other[name].to(own.device).float(), 0.5).to(own.dtype)
        return found

    def trains_on(self, record: ReplayRecord) -> bool:
        """Whether a record has what the draft reads."""
        return trains_on(self._engine.module.draft, record)

    @property
    def vocabulary(self) -> Tensor | None:
        """The tokens that an EAGLE draft proposes from, int32 ``[D]``; None of other drafts."""
        draft = self._engine.module.draft
        return draft.get_buffer(VOCABULARY) if isinstance(draft, EagleDraft) else None

    def vocabulary_of(self, state: Mapping[str, Tensor] | None) -> Tensor | None:
        """:attr:`vocabulary` of other weights (None: the initial ones)."""
        return (self._initial if state is None else state).get(VOCABULARY)

    @cached_property
    def plain_tokens(self) -> set[int]:
        """Tokens that stay in an EAGLE draft's vocabulary."""
        assert self.settings.target_path is not None
        return plain_tokens(load_tokenizer(self.settings.target_path))

    def set_vocabulary(self, ids: Tensor) -> None:
        """Replace an EAGLE draft's tokens by as many others; the weights stay."""
        self._engine.module.draft.get_buffer(VOCABULARY).copy_(ids)

    def _untrained(self) -> Draft:
        """Another draft of the same shape, without adapters."""
        own = self._engine.module.draft
        if isinstance(own, EagleDraft):
            return own.twin()
        draft = AutoModelForCausalLM.from_config(own.config, attn_implementation="eager")
        table = own.get_input_embeddings()
        if isinstance(table, SharedEmbedding):
            share_ends(draft, table.ends)
        return draft.to(self.device, self.dtype)

    def served(self, state: Mapping[str, Tensor] | None) -> Draft:
        """Another draft in eval mode with these weights (None: the initial ones)."""
        draft = self._untrained()
        load_state(draft, self._initial if state is None else state)
        return draft.eval().requires_grad_(False)
