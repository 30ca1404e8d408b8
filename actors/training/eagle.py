"""The forward of an EAGLE draft over a batch, several drafted tokens ahead.

In step j the draft predicts the j-th token behind a position whose hidden state the target has
computed; from the second on it reads its own hidden states of the step before, as when it serves
(training-time test of EAGLE-3, Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.training.batches import Batch
from paceline.actors.training.losses import (
    Objective,
    position_losses,
    recorded_acceptance,
    summarize,
)
from paceline.actors.training.settings import ObjectiveSettings
from paceline.actors.weights.eagle import VOCABULARY, EagleDraft

STEPS = 3
STEP_DECAY = 0.8  # weight of a step's loss relative to the one before
_NEVER = -1e4  # logit of tokens outside the vocabulary
# Whose logits exist at a time: a CPU keeps them in its caches, a GPU wants few launches.
_POSITIONS, _GPU_POSITIONS = 128, 2048
_WIDTHS = 512  # see batches.py: few shapes of the head
_COLUMNS, _PLACES = 16, 64  # likewise, of the trunk: in rows for attention, and one after another


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of the objective is computed; a rough one takes a seventh of the time.

    Attributes:
        steps: drafted tokens.
        tokens: least number of those that stand for the draft's vocabulary, see
            :func:`draw_tokens`; None computes all.
        rng: draws them.
    """

    steps: int = STEPS
    tokens: int | None = None
    rng: np.random.Generator | None = None


FULL = Effort()


def draft_vocabulary(draft: EagleDraft, batch: Batch) -> Batch:
    """A batch with labels in the draft's vocabulary, D tokens.

    A token outside becomes D, the column of :func:`head_logits` that has no probability; what the
    target gave it is dropped, so that a position weighs as much as the draft can propose.
    """
    return _renamed(batch, draft.get_buffer(VOCABULARY).long(), int(draft.config.vocab_size))


def draw_tokens(
    batch: Batch, size: int, least: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens that stand for a vocabulary: all that the batch names, and some of the others.

    A drawn token stands for several: with the logarithm of their number added to its logit, the
    expected sum of exponentials is that of all (sampled softmax, Jean et al., arXiv 1412.2007).

    Args:
        batch: with labels in a vocabulary of D tokens.
        size: D.
        least: number of tokens.
        rng: draws them, uniformly.

    Returns:
        int64 ``[S]`` tokens, and float32 ``[S]``, what is added to their logits.
    """
    named = torch.zeros(size + 1, dtype=torch.bool)
    for ids in (batch.top_ids, batch.output_ids):
        named[ids.reshape(-1).cpu()] = True
    own, others = (found.nonzero()[:, 0] for found in (named[:size], ~named[:size]))
    width = -(-max(least, len(own) + _WIDTHS) // _WIDTHS) * _WIDTHS
    count = min(width - len(own), len(others))
    drawn = others[torch.from_numpy(rng.permutation(len(others))[:count])]
    added = torch.zeros(len(own) + count)
    added[len(own) :] = math.log(max(len(others), 1) / max(count, 1))
    device = batch.top_ids.device
    return torch.cat([own, drawn]).to(device), added.to(device)


def _renamed(batch: Batch, ids: Tensor, whole: int) -> Batch:
    """Labels as indices into some tokens of a vocabulary of ``whole`` ones."""
    size = len(ids)
    index = torch.full((whole,), size, device=ids.device)
    index[ids] = torch.arange(size, device=ids.device)
    top = index[batch.top_ids]
    outside = top == size
    return replace(
        batch,
        output_ids=index[batch.output_ids],
        top_ids=top,
        top_logprobs=batch.top_logprobs.masked_fill(outside, -torch.inf),
        processed_probs=batch.processed_probs.masked_fill(outside, 0.0),
    )


def head_logits(draft: EagleDraft, states: Tensor) -> Tensor:
    """Logits ``[N, D + 1]`` of states ``[N, H]``; the last column is of all tokens outside."""
    return _logits(draft.head, states, None)


def _logits(head: Tensor, states: Tensor, added: Tensor | None) -> Tensor:
    logits = functional.linear(states, head)
    if added is not None:
        logits = logits.float() + added
    return functional.pad(logits, (0, 1), value=_NEVER)


def eagle_objective(
    draft: EagleDraft,
    batch: Batch,
    settings: ObjectiveSettings,
    weights: Tensor,
    effort: Effort = FULL,
) -> Objective:
    """The objective of :mod:`losses`, a mean over the steps of falling weight.

    Args:
        draft: with its target's ends.
        batch: with hidden states.
        settings: see ObjectiveSettings.
        weights: float32 ``[N]``, of the positions.
        effort: see Effort.
    """
    own, goals = draft_vocabulary(draft, batch), []
    for states in step_states(draft, batch, effort.steps):
        loss, values, accepted = _HeadLosses.apply(  # type: ignore[no-untyped-call]
            states, draft, own, settings, weights, effort
        )
        goals.append(summarize(loss, values, accepted, own))
    decays = [STEP_DECAY**step for step in range(effort.steps)]
    shares = [decay / sum(decays) for decay in decays]

    def mean(name: str) -> Tensor:
        parts = [getattr(goal, name) for goal in goals]
        return torch.stack([s * part for s, part in zip(shares, parts, strict=True)]).sum(dim=0)

    return Objective(mean("loss"), mean("per_record"), mean("expected_acceptance"))


def parts_of(states: Tensor) -> Iterator[slice]:
    """Parts of states ``[N, H]`` whose logits may exist at a time."""
    count = _POSITIONS if states.device.type == "cpu" else _GPU_POSITIONS
    return (slice(start, start + count) for start in range(0, len(states), count))


class _HeadLosses(torch.autograd.Function):
    """Losses from states, a part of the positions at a time.

    Logits of all positions would be hundreds of megabytes that every operation writes again; the
    gradient of the states is taken with each part's loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        draft: EagleDraft,
        batch: Batch,
        settings: ObjectiveSettings,
        weights: Tensor,
        effort: Effort,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss (a scalar), and loss and acceptance of every position, ``[N]`` each."""
        gradient, losses, accepted = torch.empty_like(states), [], []
        for at in parts_of(states):
            part, head, added = batch.positions(at), draft.head, None
            if effort.tokens is not None:
                assert effort.rng is not None
                ids, added = draw_tokens(part, len(head), effort.tokens, effort.rng)
                part, head = _renamed(part, ids, len(head) + 1), head[ids]
            with torch.enable_grad():
                own = states[at].detach().requires_grad_()
                logits = _logits(head, own, added)
                values = position_losses(logits, part, settings)
                if settings.loss == "hard_label":  # no label outside the vocabulary can be learnt
                    values = values * (part.output_ids < len(head))
                gradient[at] = torch.autograd.grad((weights[at] * values).sum(), own)[0]
            losses.append(values.detach())
            with torch.no_grad():
                accepted.append(recorded_acceptance(logits, part.top_ids, part.top_logprobs))
        ctx.save_for_backward(gradient)
        every = torch.cat(losses)
        kept = torch.cat(accepted)
        ctx.mark_non_differentiable(every, kept)
        return (weights * every).sum(), every, kept

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The states' gradient, times that of the loss."""
        return (outer[0] * ctx.saved_tensors[0], None, None, None, None, None)


def step_states(draft: EagleDraft, batch: Batch, steps: int = STEPS) -> list[Tensor]:
    """The head's input at the batch's positions in every step, ``[N, H]`` each.

    Every step computes the labelled positions and the ``steps - 1`` before them. Of the others,
    most of them a prompt's, the last layer only has the first step's keys and values.

    Args:
        draft: with its target's ends.
        batch: with hidden states; the positions of a record are consecutive.
        steps: drafted tokens.
    """
    assert batch.hidden is not None
    count = batch.num_records
    ends = batch.rows.new_zeros(count).scatter_reduce(0, batch.rows, batch.columns + 1, "amax")
    first = ends.scatter_reduce(0, batch.rows, batch.columns, "amin")
    every = _Spans(torch.zeros_like(ends), ends)
    own = _Spans((first - (steps - 1)).clamp(min=0), ends)
    trunk = _StepTrunk(draft, every, own)
    labelled = own.place(batch.rows, batch.columns)
    ids = batch.input_ids[every.rows, every.columns]
    known = shifted(batch.hidden.to(draft.dtype))[every.rows, every.columns]
    state = trunk.step(draft.inputs(ids, known))
    found = [state.index_select(0, labelled)]
    ids = batch.input_ids[own.rows, own.columns]
    begins = own.columns == own.starts[own.rows]
    while len(found) < steps:
        before = shifted(state[None])[0].masked_fill(begins[:, None], 0.0)
        state = trunk.step(draft.inputs(ids, before))
        found.append(state.index_select(0, labelled))
    return found


class _Spans:
    """Consecutive columns of each row of a batch, and their places one after the other.

    Products are computed at the P places, without padding, and attention in B rows of M columns.

    Attributes:
        starts: int64 ``[B]``, the first column of each row.
        width: M.
        rows: int64 ``[P]``, of each place.
        columns: int64 ``[P]``, of each place; the last ones are repeated.
    """

    def __init__(self, starts: Tensor, ends: Tensor) -> None:
        """Take the first column of each row, and the one behind its last; int64 ``[B]`` each."""
        self.starts, counts = starts, ends - starts
        self._offsets = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum()), device=starts.device)
        extra = -len(places) % _PLACES
        places = torch.cat([places, places[-1:].expand(extra)])
        self.rows = torch.bucketize(places, self._offsets, right=True) - 1
        self.columns = places - self._offsets[self.rows] + starts[self.rows]
        self.width = -(-int(counts.max()) // _COLUMNS) * _COLUMNS
        across = torch.arange(self.width, device=starts.device)
        self._padded = self._offsets[:, None] + across.minimum(counts[:, None] - 1)
        self._kept = self.rows * self.width + self.columns - starts[self.rows]

    def place(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The places of columns of rows, int64 like them."""
        return self._offsets[rows] + columns - self.starts[rows]

    def padded_columns(self) -> Tensor:
        """The columns in rows, int64 ``[B, M]``; a row's last one is repeated."""
        return self.columns[self._padded]

    def pad(self, values: Tensor) -> Tensor:
        """Values ``[P, ...]`` in rows, ``[B, M, ...]``."""
        found = values.index_select(0, self._padded.flatten())
        return found.view(*self._padded.shape, *values.shape[1:])

    def pack(self, values: Tensor) -> Tensor:
        """Values ``[B, M, ...]`` at the places, ``[P, ...]``."""
        return values.flatten(0, 1).index_select(0, self._kept)


class _StepTrunk:
    """The trunk's forwards of the steps of drafting.

    In the first step a position sees all before it. In step j it sees the first step's keys up to j
    positions before it, which follow from the target's states that are known when it is drafted,
    and one key of each drafted token since.
    """

    def __init__(self, draft: EagleDraft, every: _Spans, own: _Spans) -> None:
        """Begin before the first step.

        Args:
            draft: its trunk's modules are called one by one.
            every: all that the first step reads.
            own: what every step computes; of ``every``, up to the end of each row.
        """
        self._trunk, self._every, self._own, self._done = draft.trunk, every, own, 0
        self._narrowed = every.place(own.rows, own.columns)
        length = torch.arange(int(every.columns.max()) + 1, device=own.starts.device)
        cosines, sines = draft.trunk.rotary_emb(draft.fuse.weight, length[None])
        self._cosines, self._sines = cosines[0], sines[0]  # [T, D]
        count = len(draft.trunk.layers)
        self._keys: list[list[Tensor]] = [[] for _ in range(count)]  # by layer and step
        self._values: list[list[Tensor]] = [[] for _ in range(count)]

    def step(self, inputs: Tensor) -> Tensor:
        """The states of the next step at the places that it computes, ``[P, H]``.

        Args:
            inputs: ``[P, H]``, at all places in the first step, at the computed ones in any other.
        """
        layers, state = self._trunk.layers, inputs
        spans = self._own if self._done else self._every
        for number, layer in enumerate(layers):
            normed = layer.input_layernorm(state)
            keys = self._rotated(_heads(layer.self_attn, "k", normed), spans)
            self._keys[number].append(_in_rows(spans, keys))
            self._values[number].append(_in_rows(spans, _heads(layer.self_attn, "v", normed)))
            if not self._done and number + 1 == len(layers):
                spans = self._own
                state, normed = (x.index_select(0, self._narrowed) for x in (state, normed))
            state = state + self._attended(number, normed, spans)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        self._done += 1
        found: Tensor = self._trunk.norm(state)
        return found

    def _attended(self, number: int, normed: Tensor, spans: _Spans) -> Tensor:
        """What a layer's attention adds at some places, of all steps' keys so far."""
        attention = self._trunk.layers[number].self_attn
        # On CPUs torch's backward pass takes twice as long in bfloat16 as in float32.
        dtype = torch.float32 if normed.device.type == "cpu" else normed.dtype
        attended = functional.scaled_dot_product_attention(
            _in_rows(spans, self._rotated(_heads(attention, "q", normed), spans)).to(dtype),
            torch.cat(self._keys[number], dim=2).to(dtype),
            torch.cat(self._values[number], dim=2).to(dtype),
            self._seen(spans)[:, None],
            scale=attention.scaling,
            enable_gqa=True,
        ).to(normed.dtype)
        added: Tensor = attention.o_proj(spans.pack(attended.transpose(1, 2)).flatten(1))
        return added

    def _seen(self, spans: _Spans) -> Tensor:
        """Which keys each column sees, bool ``[B, M, T + j * M]`` in step j."""
        columns = spans.padded_columns()
        first = torch.arange(self._every.width, device=columns.device)  # a row's padding comes last
        seen = [columns[:, :, None] - first >= self._done]
        if self._done:
            at = torch.arange(spans.width, device=columns.device)
            for ago in reversed(range(self._done)):
                seen.append((at[:, None] - at == ago).expand(len(columns), -1, -1))
        return torch.cat(seen, dim=2)

    def _rotated(self, heads: Tensor, spans: _Spans) -> Tensor:
        """Heads ``[P, h, D]`` with the rotary embedding of their columns."""
        cosines: Tensor = self._cosines[spans.columns][:, None]
        sines: Tensor = self._sines[spans.columns][:, None]
        one, other = heads.chunk(2, dim=-1)
        return heads * cosines + torch.cat([-other, one], dim=-1) * sines


def _heads(attention: Any, name: str, normed: Tensor) -> Tensor:
    """Queries, keys or values of a layer's input, ``[P, h, D]``."""
    heads = getattr(attention, f"{name}_proj")(normed).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)  # Qwen 3
    found: Tensor = heads if norm is None else norm(heads)
    return found


def _in_rows(spans: _Spans, heads: Tensor) -> Tensor:
    """Heads ``[P, h, D]`` in rows, ``[B, h, M, D]``."""
    return spans.pad(heads).transpose(1, 2)


@torch.inference_mode()
def state_basis(draft: EagleDraft, batches: Iterable[Batch]) -> Tensor:
    """The principal components of the head's inputs, float32 ``[R, H]``, orthonormal rows.

    Of their second moments, not centred: a product with the head's rows needs their mean too.

    Args:
        draft: with its target's ends.
        batches: with hidden states, on any device.
    """
    size = int(draft.config.hidden_size)
    moments = torch.zeros(size, size, dtype=torch.float32, device=draft.device)
    for batch in batches:
        states = torch.cat(step_states(draft, batch.to(draft.device))).float()
        moments += states.T @ states
    vectors: Tensor = torch.linalg.eigh(moments).eigenvectors
    return vectors[:, -len(draft.basis) :].T.contiguous()


def shifted(hidden: Tensor) -> Tensor:
    """States ``[B, T, H]`` moved to the next position; the first has none, zeros."""
    return functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
