"""Serving of EAGLE drafts: trunks of several experts over one target's embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.attention import StepContext
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.fused import Layer, LayerStack, Norm, Rotary
from paceline.actors.engine.inference import inference
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.linear import StackedLinear, fuse, restore_on_error
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.native.plans import EaglePlan, PackedWeight
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.replay.record import MAX_LENGTH
from paceline.actors.speculation.experts import ExpertStack, early_ends
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.codes import codes_of
from paceline.actors.weights.eagle import SUPPORT, VOCABULARY, EagleDraft

# The target's hidden states ``[B, T, H]`` of rows at int64 ``[B, T]`` positions, zeros at -1.
HiddenReader = Callable[[Sequence[DraftRow], Tensor], Tensor]

# Positions that a draft of one layer attends to: as many as records have that it learns from, so
# that it never sees a longer context than in training, and reads no more of a long prompt.
WINDOW = MAX_LENGTH

# Tokens of a row that a round's first forward computes with the target's hidden states, at most.
_FIRST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Head:
    """The rows of the target's head for one draft vocabulary, int64 ``[D]``."""

    vocabulary: Tensor
    linear: StackedLinear


@dataclass(frozen=True, slots=True)
class _Screen:
    """Where the kernels look for the most probable token before they compute exact logits.

    Attributes:
        basis: ``[R, H]``, see EagleDraft.basis.
        head: ``[D, R]``, the head of states in that basis.
    """

    basis: PackedWeight
    head: PackedWeight


class EagleDecoder:
    """The trunks of E drafts of one shape, run together over a KV cache.

    A trunk of one layer attends to the last ``window`` positions; None: to all.

    Drafts of one vocabulary share the rows of the head: one product for all of them. Where the
    kernels can, weights are rounded to 8 bits: what a draft proposes need not be exact.
    """

    def __init__(self, drafts: Sequence[EagleDraft], capacity: int) -> None:
        """Fuse the weights; the drafts' parameters become views into the fused ones.

        Args:
            drafts: with the ends of one target.
            capacity: positions per row.
        """
        first = drafts[0]
        # Keys of a second layer depend on more than the input of their position.
        self.window = WINDOW if len(first.trunk.layers) == 1 else None
        self._ends = first.ends
        self.vocab_size = len(self._ends.embedding)
        self._rotary = Rotary(first.trunk.rotary_emb, self._ends.embedding, capacity)
        self._shared = ExpertLayout([0], first.device)
        self._heads: dict[bytes, _Head] = {}
        self._screen_of: dict[bytes, _Screen] = {}
        self._logits_buffer: tuple[tuple[bytes, int], Tensor] | None = None
        self._fuse_weights(drafts)
        self._share_heads()

    def _fuse_weights(self, drafts: Sequence[EagleDraft]) -> None:
        with restore_on_error(drafts):
            fused = fuse([(draft.fuse,) for draft in drafts], rounds=True)
            stacked = zip(*(draft.trunk.layers for draft in drafts), strict=True)
            layers = [Layer(own, self.window, rounds=True) for own in stacked]
            norm = Norm([draft.trunk.norm for draft in drafts])
            stack = LayerStack(layers, self._rotary, drafts[0].config.hidden_act)
            fused.pack()
            stack.refresh()
        self._drafts = list(drafts)
        self._fuse, self._stack, self._norm = fused, stack, norm

    def grow(self, drafts: Sequence[EagleDraft]) -> Iterator[None]:
        """Add drafts; see Decoder."""
        self._fuse_weights(drafts)
        self._share_heads()
        yield

    def refresh(self, expert: int | None = None) -> None:
        """Note that the weights of one draft, or all, have changed."""
        self._fuse.pack(expert)
        self._stack.refresh(expert)
        self._share_heads()

    def _share_heads(self) -> None:
        keys = [bytes(draft.get_buffer(VOCABULARY).cpu().numpy()) for draft in self._drafts]
        heads: dict[bytes, _Head] = {}
        for key, draft in zip(keys, self._drafts, strict=True):
            heads[key] = heads.get(key) or self._heads.get(key) or self._head(draft)
        self._heads, self._head_of = heads, keys
        self._screens = self._make_screens()
        self._plans: dict[tuple[int, bool], EaglePlan] = {}

    def _head(self, draft: EagleDraft) -> _Head:
        ids = draft.get_buffer(VOCABULARY).long()
        codes = codes_of(self._ends.head)
        own = None if codes is None else codes.rows(ids.cpu())
        linear = StackedLinear(self._ends.head[ids][None], codes=[own])
        linear.pack()
        return _Head(ids, linear)

    def _make_screens(self) -> dict[int, _Screen]:
        """Screens by expert; those of the same vocabulary and basis share one."""
        if not self.rolls_out:
            return {}
        made: dict[bytes, _Screen] = {}
        screens = {}
        for expert, draft in enumerate(self._drafts):
            if draft.has_basis:
                key = self._head_of[expert] + bytes(draft.basis.float().cpu().numpy())
                made[key] = self._screen_of.get(key) or made.get(key) or self._screen(expert)
                screens[expert] = made[key]
        self._screen_of = made
        return screens

    def _screen(self, expert: int) -> _Screen:
        kernels = self._stack.kernels
        assert kernels is not None
        basis = self._drafts[expert].basis
        head = self._heads[self._head_of[expert]].linear.weight[0] @ basis.T
        return _Screen(*(kernels.pack_rounded(part) for part in (basis, head)))

    def __call__(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int = 1
    ) -> Tensor:
        """See Decoder; hidden states of the positions before are zeros: a profile."""
        return self.with_hidden(token_ids, step, layout, keep)[0]

    def with_hidden(
        self,
        token_ids: Tensor,
        step: StepContext,
        layout: ExpertLayout,
        keep: int = 1,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute T tokens of B rows and store their keys and values.

        Args:
            token_ids: int64 ``[B, T]``.
            step: rows and positions.
            layout: experts of the rows.
            keep: 1, the last token, whatever is given.
            before: ``[B, T, H]``, hidden states of the positions before; None are zeros.

        Returns:
            logits ``[B, 1, V]`` of the last token, -inf outside the draft's vocabulary, valid until
            the next call; and its hidden state ``[B, 1, H]``.
        """
        del keep
        embedded = functional.embedding(token_ids, self._ends.embedding)
        hidden = torch.zeros_like(embedded) if before is None else before
        x = self._fuse(layout.to_experts(torch.cat([embedded, hidden], dim=-1)), layout)
        x, delta = self._stack(x, step, layout)
        x, delta = layout.last_tokens(x, 1), layout.last_tokens(delta, 1)
        last = layout.to_rows(self._norm.of_sum(x, delta, layout, self._stack.kernels))
        return self._logits(last, layout.expert_of_row), last

    @property
    def rolls_out(self) -> bool:
        """Whether there are kernels for :meth:`rollout`."""
        return self._stack.kernels is not None

    def rollout(
        self,
        token_ids: Tensor,
        step: StepContext,
        layout: ExpertLayout,
        before: Tensor,
        limits: Tensor,
        ends: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft the most probable tokens in one call of the kernels, if it ``rolls_out``.

        See :meth:`with_hidden` and Kernels.rollout.
        """
        kernels = self._stack.kernels
        assert kernels is not None
        ranks = {self._rank(expert) for expert in layout.experts}
        screened = len(ranks) == 1 and 0 not in ranks
        plans = [self._plan(expert, screened) for expert in layout.experts]
        trunk = self._stack.plan(step, layout)
        embedding = self._ends.embedding
        return kernels.rollout(trunk, plans, embedding, token_ids, before, limits, ends)

    def _rank(self, expert: int) -> int:
        """Directions of an expert's screen; 0 without one."""
        screen = self._screens.get(expert)
        return 0 if screen is None else screen.basis.out

    def _plan(self, expert: int, screened: bool) -> EaglePlan:
        if (expert, screened) not in self._plans:
            head = self._heads[self._head_of[expert]]
            parts = self._fuse.packed(expert), self._norm.weight[expert], self._norm.eps
            if screened:
                own = self._screens[expert]
                screen = own.basis, self._ends.head
                plan = EaglePlan(*parts, own.head, head.vocabulary, screen)
            else:
                plan = EaglePlan(*parts, head.linear.packed(0), head.vocabulary)
            self._plans[expert, screened] = plan
        return self._plans[expert, screened]

    def _logits(self, hidden: Tensor, experts: Sequence[int]) -> Tensor:
        keys = [self._head_of[expert] for expert in experts]
        rows = len(keys)
        if len(set(keys)) == 1:
            head = self._heads[keys[0]]
            # Outside the vocabulary the buffer stays -inf from call to call.
            if self._logits_buffer is None or self._logits_buffer[0] != (keys[0], rows):
                self._logits_buffer = (keys[0], rows), self._never(rows, hidden)
            logits = self._logits_buffer[1]
            own = head.linear(hidden.view(1, rows, -1), self._shared)[0]
            logits[:, 0].index_copy_(1, head.vocabulary, own)
            return logits
        logits = self._never(rows, hidden)
        for key in set(keys):
            at = torch.tensor([i for i, own in enumerate(keys) if own == key], device=hidden.device)
            head = self._heads[key]
            part = head.linear(hidden[at, 0][None], self._shared)[0]
            logits[at[:, None], 0, head.vocabulary] = part
        return logits

    def _never(self, rows: int, like: Tensor) -> Tensor:
        return like.new_full((rows, 1, self.vocab_size), -torch.inf)


class _Inputs(NamedTuple):
    """What drafts compute: T tokens of B rows; see ModelRunner.forward.

    Attributes:
        rows: B rows.
        token_ids: int64 ``[B, T]``.
        hidden: ``[B, T, H]``, hidden states of the positions before.
        positions: int64 ``[B, T]``.
        span: 1 + the largest position that any row reads.
        layout: drafts of the rows.
    """

    rows: Sequence[int]
    token_ids: Tensor
    hidden: Tensor
    positions: Tensor
    span: int
    layout: ExpertLayout


class EagleRunner(ModelRunner):
    """Runs E drafts, which also read hidden states."""

    decoder: EagleDecoder

    def _make_decoder(self, graph_tokens: int) -> EagleDecoder:
        del graph_tokens
        return EagleDecoder(self.models, self.max_model_len)

    @property
    def rolls_out(self) -> bool:
        """See ModelRunner; by the kernels."""
        return self.decoder.rolls_out

    def rollout(
        self,
        rows: Sequence[int],
        token_ids: Tensor,
        positions: Tensor,
        span: int,
        steps: int,
        layout: ExpertLayout,
    ) -> tuple[Tensor, Tensor] | None:
        """See ModelRunner; hidden states of the positions before are zeros: a profile."""
        if not self.rolls_out:
            return None
        count, size = len(rows), int(self.models[0].config.hidden_size)
        hidden = torch.zeros(*token_ids.shape, size, dtype=self.models[0].dtype)
        never = torch.zeros(count), torch.zeros(count, 1)
        inputs = _Inputs(rows, token_ids, hidden, positions, span, layout)
        ids, probs, _ = self.draft_greedy(inputs, torch.full((count,), steps), never)
        return ids, probs

    @inference
    def draft_greedy(
        self, inputs: _Inputs, limits: Tensor, ends: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft the most probable tokens behind the inputs; see EagleDecoder.rollout."""
        context = self._step(inputs.rows, inputs.positions, inputs.span)
        given = inputs.token_ids, context, inputs.layout, inputs.hidden
        return self.decoder.rollout(*given, limits, ends)

    @inference
    def step(self, inputs: _Inputs) -> tuple[Tensor, Tensor]:
        """Compute the inputs; see EagleDecoder.with_hidden."""
        context = self._step(inputs.rows, inputs.positions, inputs.span)
        given = inputs.token_ids, context, inputs.layout
        return self.decoder.with_hidden(*given, before=inputs.hidden)


class EagleStack(ExpertStack):
    """EAGLE experts of one target.

    A round computes the tokens since the last one with the target's hidden states, which replaces
    the keys and values of drafted tokens, and goes on with the draft's own.
    """

    recomputed = _FIRST_TOKENS

    def __init__(
        self,
        runner: EagleRunner,
        names: Sequence[str],
        rows: int,
        read_hidden: HiddenReader,
        prefill_chunk: int = 256,
    ) -> None:
        """Take the drafts.

        Args:
            runner: of ``len(names)`` drafts, for ``rows`` requests.
            names: see ExpertStack.
            rows: most requests at once.
            read_hidden: reads the target's hidden states.
            prefill_chunk: most prompt tokens per round.
        """
        super().__init__(runner, names, rows, prefill_chunk)
        self._eagles = runner
        self._read_hidden = read_hidden
        self.window = runner.decoder.window

    def _keeps_drafted(self) -> bool:
        return False  # computed from the draft's own hidden states

    def _prefill_forward(self, part: Sequence[tuple[DraftRow, int, int]]) -> None:
        width = max(end - start for _, start, end in part)
        starts = [end - width for _, _, end in part]
        self._eagles.step(self._inputs([row for row, _, _ in part], starts, width))

    def _inputs(self, rows: Sequence[DraftRow], starts: Sequence[int], width: int) -> _Inputs:
        """``width`` tokens of each row with the target's hidden states.

        Positions before the first repeat that one: the same write, done again.
        """
        places = [[max(start + i, 0) for i in range(width)] for start in starts]
        tokens = [[row.tokens[at] for at in own] for row, own in zip(rows, places, strict=True)]
        given = device_tensor([tokens, places], self._eagles.device)
        return _Inputs(
            [self._table.row(row.request_id) for row in rows],
            given[0],
            self._read_hidden(rows, given[1] - 1),
            given[1],
            max(starts) + width,
            self._batch_layout(rows),
        )

    def _last_inputs(self, rows: Sequence[DraftRow]) -> _Inputs:
        """The tokens that the rows' drafts have not computed, at least the last."""
        states = [self._sequences[row.request_id] for row in rows]
        lags = [len(r.tokens) - s.num_computed for r, s in zip(rows, states, strict=True)]
        width = max(1, *lags)
        return self._inputs(rows, [len(row.tokens) - width for row in rows], width)

    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """See ExpertStack; the most probable tokens, also for sampled rows.

        They are accepted about as often as drawn ones, and all steps of a round are one call.
        """
        return super().propose(rows, min(support, SUPPORT), generator)

    def _draft_most_probable(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor, Tensor]:
        if not self._eagles.decoder.rolls_out:
            return super()._draft_most_probable(rows)
        inputs, most = self._last_inputs(rows), max(row.num_draft_tokens for row in rows)
        return self._eagles.draft_greedy(
            inputs._replace(span=inputs.span + most - 1),
            device_tensor([row.num_draft_tokens for row in rows], self._eagles.device),
            early_ends(rows, self._eagles.device),
        )

    def _step_forward(
        self, rows: Sequence[DraftRow], steps: int
    ) -> Callable[[Tensor | None], Tensor]:
        del steps
        inputs: _Inputs | None = None
        hidden = torch.empty(0)

        def forward(drafted: Tensor | None) -> Tensor:
            nonlocal inputs, hidden
            if drafted is None:
                inputs = self._last_inputs(rows)
            else:
                assert inputs is not None
                inputs = inputs._replace(
                    token_ids=drafted,
                    hidden=hidden,
                    positions=inputs.positions[:, -1:] + 1,
                    span=inputs.span + 1,
                )
            logits, hidden = self._eagles.step(inputs)
            return logits

        return forward


def kept_hidden(kv: KVCache) -> HiddenReader:
    """The reader of hidden states that a target's KV cache in this process keeps."""
    return lambda rows, positions: kv.read_hidden([row.target_row for row in rows], positions)
