"""Experts of one architecture: one forward per drafted position for the rows of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.actors.engine.grid import Grid
from paceline.actors.engine.kv_cache import RowAllocator
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.sampling import SamplingBatch, SamplingBatchCache
from paceline.actors.engine.top_tokens import most_probable_into
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.speculation.costs import DraftPrefill, batch_prefills
from paceline.actors.speculation.draft_sampling import draw_drafts
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal, drop_non_finite
from paceline.actors.weights.slots import candidate_of, expert_of, is_candidate


class Computed:
    """Per sequence: who drafts for it, the positions that are right, and the drafts after them.

    A position is right where its keys and values are those of the sequence's own token by the
    weights of today.
    """

    def __init__(self) -> None:
        """No sequences yet."""
        self._drafts: dict[str, str] = {}
        self._right: dict[str, int] = {}
        self._drafted: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._drafts))

    def latest(self) -> list[str]:
        """All sequences, those that came last first."""
        return list(reversed(self._drafts))

    def draft(self, request_id: str) -> str:
        """Who drafts for a sequence."""
        return self._drafts[request_id]

    def begin(self, request_id: str, draft: str) -> None:
        """A sequence comes; nothing of it is computed."""
        self._drafts[request_id] = draft
        self._right[request_id] = 0

    def end(self, request_id: str) -> None:
        """A sequence goes."""
        del self._drafts[request_id]
        self._right.pop(request_id, None)
        self._drafted.pop(request_id, None)

    def lose(self, request_id: str) -> None:
        """Nothing of a sequence is right any more."""
        self._right[request_id] = 0
        self._drafted.pop(request_id, None)

    def right(self, request_id: str) -> int:
        """Positions that are right; 0 of an unknown sequence."""
        return self._right.get(request_id, 0)

    def reach(self, request_id: str, end: int) -> None:
        """Positions up to ``end`` are right."""
        self._right[request_id] = end

    def drafted(self, request_id: str, length: int, tokens: list[int]) -> None:
        """A whole sequence is right, and ``tokens`` were drafted behind it."""
        self._right[request_id] = length
        self._drafted[request_id] = tokens

    def num_uncomputed(self, request_id: str, length: int) -> int:
        """See ExpertStack.num_uncomputed."""
        drafted = max(len(self._drafted.get(request_id, ())) - 1, 0)
        return max(length - 2 - self.right(request_id) - drafted, 0)

    def presume(self, request_id: str, length: int, assumed: Sequence[int]) -> None:
        """See ExpertStack.presume."""
        right = self.right(request_id)
        if right > length:
            drafted = self._drafted.get(request_id, ())
            self._drafted[request_id] = [*assumed[: right - length], *drafted]
            self._right[request_id] = length

    def settle(self, row: DraftRow) -> int:
        """Count the drafts that came true among what is right; returns how much that is now."""
        known = self._right[row.request_id]
        for token in self._drafted.pop(row.request_id, [])[:-1]:  # the last was never fed back
            if known >= len(row.tokens) or row.tokens[known] != token:
                break
            known += 1
        self._right[row.request_id] = known
        return known


class ExpertStack:
    """Experts of one architecture: their weights, shared rows, and how far each row is computed."""

    reads_hidden = False

    def __init__(
        self, runner: ModelRunner, names: Sequence[str], rows: int, prefill_chunk: int = 256
    ) -> None:
        """Take the models.

        Args:
            runner: of ``len(names)`` models, for ``rows`` requests.
            names: one per model, in order; a candidate's slot is empty at first.
            rows: most requests at once, over all experts.
            prefill_chunk: most prompt tokens that one round reads.
        """
        self.runner = runner
        self._prefill_chunk = prefill_chunk
        self.names = tuple(names)
        self.versions = {name: 0 for name in names if not is_candidate(name)}
        self._index = {name: i for i, name in enumerate(names)}
        self._table = RowAllocator(rows)
        self._computed = Computed()
        self._grid: tuple[list[int], Grid] | None = None
        self._params = SamplingBatchCache(runner.device)
        self.prefilled = DraftPrefill()  # by the latest call
        self.faulty: frozenset[str] = frozenset()

    def alias(self, name: str, expert: str) -> None:
        """Give an expert a further name; the expert's own is fine too."""
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

    def _model(self, draft: str) -> int:
        return self._index[draft if draft in self.versions else expert_of(draft)]

    def _recompute(self, draft: str) -> None:
        """Read again what was read with a slot's weights, also for those of an empty slot."""
        for request_id in self._computed:
            own = self._computed.draft(request_id)
            if own == draft or (own not in self.versions and expert_of(own) == draft):
                self._computed.lose(request_id)

    def num_uncomputed(self, request_id: str, length: int) -> int:
        """Tokens of a sequence of ``length`` that are to be read before drafting, at least.

        Drafts that came true have been computed as they were drafted; how many did is seen when
        the sequence is drafted for again, so all count here.
        """
        return self._computed.num_uncomputed(request_id, length)

    def release(self, request_id: str) -> None:
        """Free a sequence's row."""
        if request_id not in self._table:
            return
        self.runner.kv.free(self._table.free(request_id))
        self._computed.end(request_id)

    def presume(self, request_id: str, length: int, assumed: Sequence[int]) -> None:
        """Take a sequence back to what is certain, after drafting beyond it.

        What was computed for the assumed tokens stays of use where they come true.

        Args:
            request_id: unknown ones are fine.
            length: tokens of the sequence that are certain.
            assumed: the tokens behind them with which it was last proposed for.
        """
        self._computed.presume(request_id, length, assumed)

    def _catch_up(self, rows: Sequence[DraftRow]) -> list[int]:
        """Bring sequences to within two tokens of their ends, within the prefill budget.

        One for which there is no memory drafts nothing in this round.

        Every round starts with the last two tokens, because after full acceptance the last
        draft token has not been through the draft yet.

        Returns:
            indices of the rows that are there; the others go on in the next round.
        """
        ready, budget = [], self._prefill_chunk
        stretches: list[tuple[DraftRow, int, int]] = []
        victims: set[str] = set()
        for i, row in enumerate(rows):
            if row.request_id not in self._table:
                slot = self._table.allocate(row.request_id)
                self.runner.kv.prompt_lengths[slot] = len(row.tokens) - row.num_output
                self._computed.begin(row.request_id, row.draft)
            known, wanted = self._computed.settle(row), max(len(row.tokens) - 2, 0)
            if not self._reserve(row, victims):
                continue
            end = min(wanted, known + budget)
            if known < end:
                stretches.append((row, known, end))
                budget -= end - known
            if end >= wanted:
                ready.append(i)
        self._read([s for s in stretches if s[0].request_id not in victims])
        return [i for i in ready if rows[i].request_id not in victims]

    def _read(self, stretches: Sequence[tuple[DraftRow, int, int]]) -> None:
        """Read positions ``start`` to ``end - 1`` of rows, several in one forward."""
        lengths = [end - start for _, start, end in stretches]
        for part in batch_prefills(lengths, self._prefill_chunk):
            own = [stretches[i] for i in part]
            self.runner.read(
                [self._table.row(row.request_id) for row, _, _ in own],
                [row.tokens[start:end] for row, start, end in own],
                [start for _, start, _ in own],
                [self._model(row.draft) for row, _, _ in own],
            )
            for row, _, end in own:
                self._computed.reach(row.request_id, end)
        self.prefilled = DraftPrefill(len(stretches), sum(lengths))

    def _reserve(self, row: DraftRow, victims: set[str]) -> bool:
        """Have blocks for a sequence's drafts; those that came after it give up theirs for it.

        Were nobody to give way, all could wait for the last block with none to draft.
        """
        kv, slot = self.runner.kv, self._table.row(row.request_id)
        while not kv.allocate(slot, len(row.tokens) + row.num_draft_tokens):
            for other in self._computed.latest():
                if other == row.request_id:
                    return False
                if kv.blocks(self._table.row(other)):
                    break
            kv.free(self._table.row(other))
            self._computed.lose(other)
            victims.add(other)
        return True

    @torch.inference_mode()
    def read(self, row: DraftRow) -> bool:
        """Read a further part of a prompt, ``prefill_chunk`` tokens at most.

        Returns:
            True where more is left to read, and this call has got further.
        """
        before = self._computed.right(row.request_id)
        return not self._catch_up([row]) and self._computed.right(row.request_id) > before

    def _layout(self, rows: Sequence[DraftRow]) -> Grid:
        """The grid of a batch, made anew only when the batch has changed."""
        experts = [self._model(row.draft) for row in rows]
        if self._grid is None or self._grid[0] != experts:
            self._grid = experts, Grid(experts, self.runner.device)
        return self._grid[1]

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """Draft for rows of these experts, one forward per position for all of them.

        Rows whose prompt is still being read draft nothing yet. Where a draft gives no
        probabilities a row's tokens end, and ``faulty`` names it until the next call.
        """
        self.faulty = frozenset()
        ready = self._catch_up(rows)
        if not ready:
            return Proposal.empty(len(rows), self.runner.device)
        drafts = self._draft([rows[i] for i in ready], support, generator)
        return drafts.scatter(ready, len(rows))

    def _draft(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        device = self.runner.device
        batch = self._params.get([row.sampling for row in rows])
        if batch.all_greedy and batch.logits_processors is None:
            chosen, chosen_probs = self._draft_greedy(rows)
            ids, probs = chosen[..., None], chosen_probs[..., None]
        else:
            chosen, chosen_probs, ids, probs = self._draft_sampled(rows, batch, support, generator)
        for row, guesses in zip(rows, chosen.tolist(), strict=True):
            # A row that drafts less than its neighbours has no blocks for the rest.
            own = guesses[: row.num_draft_tokens]
            self._computed.drafted(row.request_id, len(row.tokens), own)
        counts = device_tensor([row.num_draft_tokens for row in rows], device)
        proposal = Proposal(chosen, counts, chosen_probs, ids, probs)
        proposal, truncated = drop_non_finite(proposal)
        if truncated is not None:
            self.faulty = self._discard(
                [row for row, bad in zip(rows, truncated, strict=True) if bad]
            )
        return proposal

    def _discard(self, rows: Sequence[DraftRow]) -> frozenset[str]:
        """Wipe the keys and values of rows whose draft is not finite; returns their drafts."""
        for row in rows:
            self.runner.kv.zero(self._table.row(row.request_id))
            self._computed.lose(row.request_id)
        return frozenset(row.draft for row in rows)

    def _draft_greedy(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor]:
        """Tokens int64 and their probabilities float32, ``[B, k]`` each."""
        steps = max(row.num_draft_tokens for row in rows)
        replayed = self._replay(rows, steps)
        if replayed is not None:
            return replayed
        shape = (steps, len(rows), 1)
        ids = torch.empty(shape, dtype=torch.int64, device=self.runner.device)
        probs = torch.empty(shape, device=self.runner.device)
        forward, tokens = self._forwards(rows, steps), None
        for step_ids, step_probs in zip(ids, probs, strict=True):
            most_probable_into(forward(tokens), step_ids, step_probs)
            tokens = step_ids
        return ids.squeeze(-1).T, probs.squeeze(-1).T

    def _replay(self, rows: Sequence[DraftRow], steps: int) -> tuple[Tensor, Tensor] | None:
        """As :meth:`_draft_greedy`, where the runner has it recorded."""
        if not self.runner.replays:
            return None
        slots = [self._table.row(row.request_id) for row in rows]
        start = device_tensor([_beginning(row) for row in rows], self.runner.device)
        span = max(len(row.tokens) for row in rows) + steps - 1
        at = start[:, :2], start[:, 2:]
        return self.runner.rollout(slots, *at, span, steps, self._layout(rows))

    def _draft_sampled(
        self,
        rows: Sequence[DraftRow],
        batch: SamplingBatch,
        support: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """As :func:`drawing.draw_drafts`."""
        steps = max(row.num_draft_tokens for row in rows)
        histories = [(row.tokens, row.num_output) for row in rows]
        forward = self._forwards(rows, steps)
        return draw_drafts(forward, steps, histories, batch, support, generator)

    def _forwards(self, rows: Sequence[DraftRow], steps: int) -> Callable[[Tensor | None], Tensor]:
        """The round's forwards, one per call: int64 ``[B, 1]`` drafted before it, None at first.

        Each gives logits ``[B, 1, V]``.
        """
        slots = [self._table.row(row.request_id) for row in rows]
        grid, span = self._layout(rows), max(len(row.tokens) for row in rows)
        given = [
            [*_beginning(row), *range(n, n - 1 + steps)] for row in rows if (n := len(row.tokens))
        ]
        start = device_tensor(given, self.runner.device)
        columns = iter(start.unsqueeze(-1).unbind(1)[4:])

        def forward(drafted: Tensor | None) -> Tensor:
            nonlocal span
            if drafted is None:
                tokens, positions = start[:, :2], start[:, 2:4]
            else:
                tokens, positions, span = drafted, next(columns), span + 1
            return self.runner.forward(slots, tokens, positions, span, keep=1, grid=grid)

        return forward


def _beginning(row: DraftRow) -> list[int]:
    """A row's last two tokens, and their positions.

    A prompt of one token feeds it twice at position 0: the same write, done twice.
    """
    count = len(row.tokens)
    return [*(2 * list(row.tokens[-2:]))[-2:], max(count - 2, 0), count - 1]
