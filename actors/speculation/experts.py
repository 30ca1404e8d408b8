"""Experts of one architecture: one forward per drafted position for the rows of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.inference import inference
from paceline.actors.engine.kv_cache import RowAllocator
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.sampling import SamplingBatchCache
from paceline.actors.engine.top_tokens import most_probable_into
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.speculation.costs import DraftPrefill, batch_prefills
from paceline.actors.speculation.draft_sampling import draw_drafts, takes_most_probable
from paceline.actors.speculation.early_end import kept_lengths
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal, drop_non_finite
from paceline.actors.weights.slots import candidate_of, expert_of, is_candidate


@dataclass(slots=True)
class _DraftState:
    """What a draft has computed of a sequence.

    Attributes:
        draft: name of the draft.
        num_computed: positions with keys and values of the sequence's own tokens, by the present
            weights.
        drafted: tokens that were drafted behind these positions in the latest call; all but the
            last are computed.
    """

    draft: str
    num_computed: int = 0
    drafted: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Invalidate all that is computed."""
        self.num_computed, self.drafted = 0, []

    def roll_back(self, length: int, assumed: Sequence[int]) -> None:
        """See ExpertStack.roll_back."""
        beyond = self.num_computed - length
        if beyond > 0:
            self.drafted = [*assumed[:beyond], *self.drafted]
            self.num_computed = length

    def confirm_drafted(self, tokens: Sequence[int]) -> int:
        """Count the drafted tokens that the sequence continued with; returns num_computed."""
        for token in self.drafted[:-1]:
            if self.num_computed >= len(tokens) or tokens[self.num_computed] != token:
                break
            self.num_computed += 1
        self.drafted = []
        return self.num_computed


class ExpertStack:
    """Experts of one architecture: their weights, shared KV cache rows, and computed positions.

    Attributes:
        recomputed: last tokens of a sequence that a round computes itself, without a prefill. After
            full acceptance the last draft token has not been through the draft: two.
        window: last tokens of a sequence that are read; None: all.
    """

    recomputed = 2
    window: int | None = None

    def __init__(
        self, runner: ModelRunner, names: Sequence[str], rows: int, prefill_chunk: int = 256
    ) -> None:
        """Take the models.

        Args:
            runner: of ``len(names)`` models, for ``rows`` requests.
            names: one per model, in order; a candidate's slot is empty at first.
            rows: most requests at once, over all experts.
            prefill_chunk: most prompt tokens per round.
        """
        self.runner = runner
        self._prefill_chunk = prefill_chunk
        self.names = tuple(names)
        self.versions = {name: 0 for name in names if not is_candidate(name)}
        self._index = {name: i for i, name in enumerate(names)}
        self._table = RowAllocator(rows)
        self._sequences: dict[str, _DraftState] = {}  # by request_id, oldest first
        self._expert_layout: tuple[list[int], ExpertLayout] | None = None
        self._params = SamplingBatchCache(runner.device)
        self.prefilled = DraftPrefill()  # by the latest call
        self.faulty: frozenset[str] = frozenset()

    def alias(self, name: str, expert: str) -> None:
        """Give an expert a further name, or its own again."""
        self._index[name] = self._index[expert]
        self.versions[name] = self.versions[expert]

    def add_expert(self, expert: str, like: str) -> Iterator[None]:
        """Add an expert as a copy of another one's initial weights.

        It is added a part at a time: rounds may run between two parts. Afterwards it is at
        version 0, with an empty candidate's slot if the others have one. Sequences are unaffected.

        Args:
            expert: a new name.
            like: one of these.

        Raises:
            KeyError: there is no ``like``.
        """
        first = like + INITIAL_SUFFIX
        model = self.runner.models[self._index.get(first, self._index[like])]
        slots = any(map(is_candidate, self.names))
        names = (expert, candidate_of(expert)) if slots else (expert,)
        models = []
        for _ in names:
            models.append(copy.deepcopy(model))
            yield
        yield from self.runner.grow(models)
        self._index |= {name: len(self.names) + i for i, name in enumerate(names)}
        self.names += names
        self.versions[expert] = 0
        if first in self._index:
            self.alias(expert + INITIAL_SUFFIX, first)

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Load new weights; keys and values of the old ones are recomputed.

        Raises:
            KeyError: there is no such slot.
            ValueError: the weights have another shape.
        """
        self.runner.load_weights(state, self._index[slot])
        self.versions[slot] = weight_version
        self._recompute(slot)

    def remove_candidate(self, slot: str) -> None:
        """Empty a candidate's slot; its sequences continue with the stable weights."""
        if self.versions.pop(slot, None) is not None:
            self._recompute(slot)

    def version(self, draft: str) -> int:
        """The weight_version that a draft proposes with: without a candidate the stable one."""
        return self.versions[draft if draft in self.versions else expert_of(draft)]

    def model(self, draft: str) -> int:
        """The model that computes a draft: until it has learnt that of its initial weights.

        Experts that begin alike are computed as one until then, which reads their weights once.
        """
        slot = draft if draft in self.versions else expert_of(draft)
        first = slot + INITIAL_SUFFIX
        return self._index[first if self.versions[slot] == 0 and first in self._index else slot]

    def _recompute(self, draft: str) -> None:
        """Invalidate what was computed with a slot's weights, also by drafts of empty slots."""
        for state in self._sequences.values():
            own = state.draft
            if own == draft or (own not in self.versions and expert_of(own) == draft):
                state.reset()

    def num_uncomputed(self, request_id: str, length: int) -> int:
        """Tokens of a sequence of ``length`` to compute before drafting, at least.

        Drafted tokens were computed as they were drafted. How many were accepted is only known at
        the next draft, so all count as computed here.
        """
        state = self._sequences.get(request_id)
        computed = state.num_computed + max(len(state.drafted) - 1, 0) if state else 0
        return max(length - self.recomputed - max(computed, self._first_read(length)), 0)

    def _first_read(self, length: int) -> int:
        """The first position that is read behind a sequence of ``length`` tokens."""
        return 0 if self.window is None else max(length - self.window, 0)

    def release(self, request_id: str) -> None:
        """Free a sequence's row."""
        if request_id not in self._table:
            return
        self.runner.kv.free(self._table.free(request_id))
        del self._sequences[request_id]

    def roll_back(self, request_id: str, length: int, assumed: Sequence[int]) -> None:
        """Roll a sequence back to its confirmed tokens, after drafting ahead of them.

        What was computed for the assumed tokens is kept in case they are accepted.

        Args:
            request_id: unknown ones are fine.
            length: confirmed tokens of the sequence.
            assumed: the tokens behind them in the latest proposal's row.
        """
        if request_id in self._sequences:
            self._sequences[request_id].roll_back(length, assumed)

    def _prefill_rows(self, rows: Sequence[DraftRow]) -> list[int]:
        """Compute sequences up to their ``recomputed`` last tokens, within the prefill budget.

        A sequence without memory drafts nothing in this round.

        Returns:
            indices of the rows that are ready; the others continue in the next round.
        """
        ready, budget = [], self._prefill_chunk
        chunks: list[tuple[DraftRow, int, int]] = []
        preempted: set[str] = set()
        for i, row in enumerate(rows):
            if row.request_id not in self._table:
                kv_row = self._table.allocate(row.request_id)
                self.runner.kv.prompt_lengths[kv_row] = len(row.tokens) - row.num_output
                self._sequences[row.request_id] = _DraftState(row.draft)
            computed = self._sequences[row.request_id].confirm_drafted(row.tokens)
            start = max(computed, self._first_read(len(row.tokens)))
            wanted = max(len(row.tokens) - self.recomputed, 0)
            if not self._allocate(row, preempted):
                continue
            end = min(wanted, start + budget)
            if start < end:
                chunks.append((row, start, end))
                budget -= end - start
            if end >= wanted:
                ready.append(i)
        self._prefill_chunks([c for c in chunks if c[0].request_id not in preempted])
        return [i for i in ready if rows[i].request_id not in preempted]

    def _prefill_chunks(self, chunks: Sequence[tuple[DraftRow, int, int]]) -> None:
        """Compute positions ``start`` to ``end - 1`` of rows, several in one forward."""
        lengths = [end - start for _, start, end in chunks]
        for part in batch_prefills(lengths, self._prefill_chunk):
            own = [chunks[i] for i in part]
            self._prefill_forward(own)
            for row, _, end in own:
                self._sequences[row.request_id].num_computed = end
        self.prefilled = DraftPrefill(len(chunks), sum(lengths))

    def _prefill_forward(self, part: Sequence[tuple[DraftRow, int, int]]) -> None:
        self.runner.prefill_batch(
            [self._table.row(row.request_id) for row, _, _ in part],
            [row.tokens[start:end] for row, start, end in part],
            [start for _, start, _ in part],
            [self.model(row.draft) for row, _, _ in part],
        )

    def _keeps_drafted(self) -> bool:
        """Whether keys and values of accepted draft tokens stay valid."""
        return True

    def _allocate(self, row: DraftRow, preempted: set[str]) -> bool:
        """Allocate blocks for a sequence's drafts; preempt later sequences if there are none.

        Without preemption all sequences could wait for the last block, and none would draft.
        """
        kv, kv_row = self.runner.kv, self._table.row(row.request_id)
        while not kv.allocate(kv_row, len(row.tokens) + row.num_draft_tokens):
            for other in reversed(self._sequences):
                if other == row.request_id:
                    return False
                if kv.blocks(self._table.row(other)):
                    break
            kv.free(self._table.row(other))
            self._sequences[other].reset()
            preempted.add(other)
        return True

    @inference
    def prefill(self, row: DraftRow) -> bool:
        """Compute a further part of a prompt, ``prefill_chunk`` tokens at most.

        Returns:
            True if this call made progress and more is left.
        """
        state = self._sequences.get(row.request_id)
        before = state.num_computed if state else 0
        ready = self._prefill_rows([row])
        return not ready and self._sequences[row.request_id].num_computed > before

    def _batch_layout(self, rows: Sequence[DraftRow]) -> ExpertLayout:
        """The layout of a batch, cached while the batch stays the same."""
        experts = [self.model(row.draft) for row in rows]
        if self._expert_layout is None or self._expert_layout[0] != experts:
            self._expert_layout = experts, ExpertLayout(experts, self.runner.device)
        return self._expert_layout[1]

    @inference
    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """Draft for rows of these experts, one forward per position for all of them.

        Rows without their prompt computed draft nothing yet. A row is truncated before a
        non-finite probability; ``faulty`` names its draft until the next call.
        """
        self.faulty = frozenset()
        ready = self._prefill_rows(rows)
        if not ready:
            return Proposal.empty(len(rows), self.runner.device)
        drafts = self._draft([rows[i] for i in ready], support, generator)
        return drafts.scatter(ready, len(rows))

    def _draft(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        batch = self._params.get([row.sampling for row in rows])
        if takes_most_probable(batch, rows, support):
            chosen, probs, counts = self._draft_most_probable(rows)
            proposal = Proposal.of_most_probable(chosen, counts, probs)
        else:
            steps = max(row.num_draft_tokens for row in rows)
            forward = self._step_forward(rows, steps)
            proposal = draw_drafts(forward, steps, rows, batch, support, generator)
        for row, guesses in zip(rows, proposal.token_ids.tolist(), strict=True):
            # A row that drafts less than its neighbours has no blocks for the rest.
            state = self._sequences[row.request_id]
            state.num_computed = len(row.tokens)
            state.drafted = guesses[: row.num_draft_tokens] if self._keeps_drafted() else []
        proposal, truncated = drop_non_finite(proposal)
        if truncated is not None:
            bad = [row for row, flag in zip(rows, truncated, strict=True) if flag]
            for row in bad:
                self.runner.kv.zero(self._table.row(row.request_id))
                self._sequences[row.request_id].reset()
            self.faulty = frozenset(row.draft for row in bad)
        return proposal

    def _draft_most_probable(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens int64 and probabilities float32 ``[B, k]``, and int64 ``[B]`` how many each has.

        Rows may end early, but for those of a recorded graph.
        """
        steps, device = max(row.num_draft_tokens for row in rows), self.runner.device
        limits = device_tensor([row.num_draft_tokens for row in rows], device)
        replayed = self._replay(rows, steps)
        if replayed is not None:
            return *replayed, limits
        shape = (steps, len(rows), 1)
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        probs = torch.empty(shape, device=device)
        rule = early_ends(rows, device)
        forward, tokens, drafted = self._step_forward(rows, steps), None, 0
        for step_ids, step_probs in zip(ids, probs, strict=True):
            most_probable_into(forward(tokens), step_ids, step_probs)
            tokens, drafted = step_ids, drafted + 1
            if drafted < steps and (kept_lengths(probs[:drafted, :, 0].T, *rule) < drafted).all():
                break
        ids, probs = ids[:drafted].squeeze(-1).T, probs[:drafted].squeeze(-1).T
        counts = torch.minimum(limits, kept_lengths(probs, *rule))
        most = int(counts.max())  # the target computes every column
        return ids[:, :most], probs[:, :most], counts

    def _replay(self, rows: Sequence[DraftRow], steps: int) -> tuple[Tensor, Tensor] | None:
        """As :meth:`_draft_most_probable`, by a recorded graph; None if the runner has none."""
        if not self.runner.rolls_out:
            return None
        kv_rows = [self._table.row(row.request_id) for row in rows]
        start = device_tensor([_last_two(row) for row in rows], self.runner.device)
        span = max(len(row.tokens) for row in rows) + steps - 1
        at = start[:, :2], start[:, 2:]
        return self.runner.rollout(kv_rows, *at, span, steps, self._batch_layout(rows))

    def _step_forward(
        self, rows: Sequence[DraftRow], steps: int
    ) -> Callable[[Tensor | None], Tensor]:
        """The forward of a draft step: int64 ``[B, 1]`` drafted before, None at first, to logits.

        Logits are ``[B, 1, V]``; call it at most ``steps`` times.
        """
        kv_rows = [self._table.row(row.request_id) for row in rows]
        layout, span = self._batch_layout(rows), max(len(row.tokens) for row in rows)
        given = [
            [*_last_two(row), *range(n, n - 1 + steps)] for row in rows if (n := len(row.tokens))
        ]
        start = device_tensor(given, self.runner.device)
        columns = iter(start.unsqueeze(-1).unbind(1)[4:])

        def forward(drafted: Tensor | None) -> Tensor:
            nonlocal span
            if drafted is None:
                tokens, positions = start[:, :2], start[:, 2:4]
            else:
                tokens, positions, span = drafted, next(columns), span + 1
            return self.runner.forward(kv_rows, tokens, positions, span, keep=1, layout=layout)

        return forward


def early_ends(rows: Sequence[DraftRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows' rules: float32 ``[B]`` and ``[B, CONFIDENCE_BINS]``, see kept_lengths."""
    least, acceptance = zip(*(row.early_end for row in rows), strict=True)
    return device_tensor(list(least), device), device_tensor(list(acceptance), device)


def _last_two(row: DraftRow) -> list[int]:
    """A row's last two tokens, and their positions.

    A prompt of one token is fed twice at position 0: the same write, done twice.
    """
    count = len(row.tokens)
    return [*(2 * list(row.tokens[-2:]))[-2:], max(count - 2, 0), count - 1]
