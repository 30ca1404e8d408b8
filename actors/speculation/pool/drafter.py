"""Drafting for the sequences of all targets with one expert.

Drafting ahead. While the target verifies k drafts, the expert assumes that all of them are
accepted: it guesses the bonus token and drafts k more behind it. If exactly these tokens arrive,
the response is ready; otherwise it is dropped. This does not change the output distribution.
Greedy and seeded proposals are functions of the prefix. An unseeded proposal is a fresh sample
from q(. | assumed prefix), drawn by the expert's own generator after the assumed prefix was fixed;
whether the assumption holds depends on the assumed tokens and on the target's own randomness, never
on the sample behind them. So given that it is used, it is a sample from q(. | prefix), independent
of the target's later accept/reject draws, which is all that speculative sampling requires. A
proposal ahead is valid for the next request about its sequence only, and new weights drop all of
them.

Prefill. A request prefills one small chunk, because a round waits for the response; rows that are
not prefilled to the end draft nothing. The rest is prefilled between requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.pending_updates import PartialLoads, SwapWeights
from paceline.actors.speculation.pool.draft_ahead import DraftAheadPolicy
from paceline.actors.speculation.pool.hidden_states import ReceivedStates, num_states
from paceline.actors.speculation.pool.messages import (
    DraftRequest,
    DraftRequestRow,
    DraftResponse,
    Float32,
    Int32,
)
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import is_candidate

logger = logging.getLogger(__name__)


class RowProposal(NamedTuple):
    """One row's proposal: ``[k]`` tokens and probabilities, ``[k, S]`` supports."""

    token_ids: Int32
    token_probs: Float32
    support_ids: Int32
    support_probs: Float32

    def part(self, start: int, stop: int | None = None) -> RowProposal:
        """Return the positions from ``start`` up to ``stop``."""
        at = slice(start, stop)
        return RowProposal(
            self.token_ids[at], self.token_probs[at], self.support_ids[at], self.support_probs[at]
        )


@dataclass(slots=True)
class SequenceState:
    """A sequence as far as the expert has it.

    Attributes:
        key: names it in the expert's stack.
        draft: as in DraftRow, likewise ``sampling`` and ``num_output``.
        tokens: prompt and output.
        proposed: the latest response's tokens, if drafting ahead continues from them.
        assumed: the tokens assumed to follow the present ones.
        drafted_ahead: proposal behind ``assumed``.
        released: whether the stack has dropped it.
    """

    key: str
    draft: str
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    num_output: int = 0
    proposed: tuple[int, ...] = ()
    assumed: tuple[int, ...] = ()
    drafted_ahead: RowProposal | None = None
    released: bool = False

    def row(self, num_draft_tokens: int, more_tokens: tuple[int, ...] = ()) -> DraftRow:
        """Return the row for the stack, with tokens appended to the present ones."""
        return DraftRow(
            request_id=self.key,
            draft=self.draft,
            tokens=[*self.tokens, *more_tokens],
            num_output=self.num_output + len(more_tokens),
            num_draft_tokens=num_draft_tokens,
            sampling=self.sampling,
        )


def split_rows(rows: Sequence[DraftRow], proposal: Proposal) -> dict[str, RowProposal]:
    """Split a batch's proposal by request_id; rows without drafts are left out."""
    counts = proposal.num_drafted.tolist()
    tensors = (
        proposal.token_ids.int(),
        proposal.token_probs.float(),
        proposal.support_ids.int(),
        proposal.support_probs.float(),
    )
    arrays = [tensor.cpu().numpy() for tensor in tensors]
    return {
        row.request_id: RowProposal(*(array[i, :count] for array in arrays))
        for i, (row, count) in enumerate(zip(rows, counts, strict=True))
        if count
    }


class PaddedRows(TypedDict):
    """The arrays of a DraftResponse."""

    num_drafted: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    token_probs: NDArray[np.float32]
    support_ids: NDArray[np.int32]
    support_probs: NDArray[np.float32]


def pad_rows(rows: Sequence[RowProposal | None]) -> PaddedRows:
    """Pad rows to the arrays of a DraftResponse, by field; None is a row without drafts."""
    lengths = [0 if row is None else len(row.token_ids) for row in rows]
    shape = len(rows), max(lengths, default=0)
    width = max((row.support_ids.shape[1] for row in rows if row is not None), default=1)
    token_ids, token_probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    support_ids = np.zeros((*shape, width), np.int32)
    support_probs = np.zeros((*shape, width), np.float32)
    for i, row in enumerate(rows):
        if row is not None:
            steps, own_width = row.support_ids.shape
            token_ids[i, :steps] = row.token_ids
            token_probs[i, :steps] = row.token_probs
            support_ids[i, :steps, :own_width] = row.support_ids
            support_probs[i, :steps, :own_width] = row.support_probs
    return {
        "num_drafted": np.asarray(lengths, dtype=np.int32),
        "token_ids": token_ids,
        "token_probs": token_probs,
        "support_ids": support_ids,
        "support_probs": support_probs,
    }


class WeightSlots:
    """An expert's slots: stable, candidate and initial weights.

    Attributes:
        failed_candidate: weight_version of the latest failed one; other threads read it.
        partial_loads: stable slots to load again.
    """

    def __init__(self, stack: ExpertStack) -> None:
        self._stack = stack
        self.failed_candidate: int | None = None
        self.partial_loads = PartialLoads()

    @property
    def versions(self) -> dict[str, int]:
        """weight_version by slot; a candidate's only if there is one."""
        return dict(self._stack.versions)

    def load(self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Load weights into a slot, or empty a candidate's with None.

        Raises:
            KeyError: no such slot.
            ValueError: weights of another shape; a stable slot is unchanged.
            Exception: whatever else loading raises; a stable slot is loaded in part then.
                After any of these a candidate has failed and its slot is empty.
        """
        if state is None:
            self._stack.remove_candidate(slot)
            return
        try:
            self._stack.load_weights(slot, weight_version, state)
        except Exception as error:
            self.partial_loads.add(SwapWeights(slot, weight_version, state), error)
            if is_candidate(slot):
                self.failed_candidate = weight_version
                self._stack.remove_candidate(slot)
            raise
        self.partial_loads.discard(slot)

    def fail_candidates(self, faulty: Iterable[str]) -> None:
        """Empty the candidate's slot if it is among faulty drafts."""
        for draft in faulty:
            if is_candidate(draft) and draft in self._stack.versions:
                self.failed_candidate = self._stack.version(draft)
                self._stack.remove_candidate(draft)

    def is_partial(self, draft: str) -> bool:
        """Return whether a draft's weights were loaded in part."""
        return bool(self.partial_loads) and self.partial_loads.affects(draft, self._stack.versions)


class Drafter:
    """Serves draft requests of several targets with one stack; knows no sockets and no clock."""

    def __init__(
        self,
        stack: ExpertStack,
        *,
        support: int,
        generator: torch.Generator,
        max_sequences: int,
        epoch: int,
        draft_ahead: DraftAheadPolicy,
        hidden: ReceivedStates | None = None,
    ) -> None:
        """Use an expert's stack.

        Args:
            stack: of the expert and its initial weights; its prefill chunk bounds how long a
                request waits.
            support: the most tokens that a distribution may hold.
            generator: randomness of unseeded drafts.
            max_sequences: the stack's rows; a sequence beyond them drafts nothing.
            epoch: identifies this process.
            draft_ahead: see DraftAheadPolicy.
            hidden: where an EAGLE stack reads the target's hidden states; None of other stacks.
        """
        self._stack = stack
        self.slots = WeightSlots(stack)
        self._support = support
        self._generator = generator
        self._max_sequences = max_sequences
        self._max_tokens = stack.runner.max_model_len
        self.epoch = epoch
        self._draft_ahead_policy = draft_ahead
        self._hidden = hidden
        self._sequences: dict[int, dict[str, SequenceState]] = {}  # by client and request_id
        self._to_draft_ahead: list[SequenceState] = []
        self._to_prefill: list[SequenceState] = []
        self.failures = 0

    @property
    def hidden_size(self) -> int:
        """H, of the hidden states that requests must bring; 0 for none."""
        return 0 if self._hidden is None else self._hidden.hidden_size

    @property
    def num_sequences(self) -> int:
        """Sequences of all clients."""
        return sum(map(len, self._sequences.values()))

    @property
    def has_idle_work(self) -> bool:
        """Whether :meth:`run_idle_work` has something to do."""
        return bool(self._to_draft_ahead or self._to_prefill)

    def run_idle_work(self) -> None:
        """Draft ahead, or prefill a chunk, while there are no requests."""
        if self._to_draft_ahead:
            self._draft_ahead()
        elif self._to_prefill:
            self._prefill()

    def load_weights(
        self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None
    ) -> None:
        """Load weights into a slot, or empty a candidate's with None; see WeightSlots.load.

        Raises:
            Exception: they could not be loaded.
        """
        try:
            self.slots.load(slot, weight_version, state)
        finally:  # a failed load too may have changed the slot
            self._to_draft_ahead.clear()
            for sequence in self._all_sequences():
                sequence.drafted_ahead = None
            self._to_prefill = [seq for seq in self._all_sequences() if seq.draft == slot]

    def release(self, client: int, request_ids: Sequence[str]) -> None:
        """Release sequences; unknown ones are fine."""
        for request_id in request_ids:
            sequence = self._sequences.get(client, {}).pop(request_id, None)
            if sequence is not None:
                self._drop(sequence)

    def release_client(self, client: int) -> None:
        """Release all sequences of a client."""
        self.release(client, list(self._sequences.get(client, ())))
        self._sequences.pop(client, None)

    def skip(self, client: int, request: DraftRequest) -> None:
        """Take the tokens of a superseded request without drafting for it."""
        for row in request.rows:
            sequence = self._update(client, row)
            if sequence is not None:
                sequence.drafted_ahead = None  # valid for this request only

    def propose(self, requests: Sequence[tuple[int, DraftRequest]]) -> list[DraftResponse]:
        """Draft for the requests of several clients in one batch.

        Args:
            requests: (client, request), one per client.

        Returns:
            the responses, in the same order.
        """
        self._to_draft_ahead.clear()
        batch = [
            [self._update(client, row) for row in request.rows] for client, request in requests
        ]
        proposals: dict[str, RowProposal] = {}
        rows: list[DraftRow] = []
        for (_, request), sequences in zip(requests, batch, strict=True):
            for row, sequence in zip(request.rows, sequences, strict=True):
                if sequence is None:
                    continue
                if row.num_draft_tokens == 0:
                    continue
                if sequence.drafted_ahead is not None:
                    proposals[sequence.key] = sequence.drafted_ahead.part(0, row.num_draft_tokens)
                else:
                    rows.append(sequence.row(row.num_draft_tokens))
        hits = set(proposals)
        proposals |= self._run_stack(rows)
        self._queue_prefills([seq for seq in chain(*batch) if seq is not None], proposals)
        responses = []
        for (_, request), sequences in zip(requests, batch, strict=True):
            self._queue_draft_ahead(sequences, proposals, request.draft_ahead)
            responses.append(self._response(request, sequences, proposals, hits))
        return responses

    def _draft_ahead(self) -> None:
        """Draft behind the latest responses, assuming that all their tokens are accepted."""
        sequences = [seq for seq in self._to_draft_ahead if seq.proposed]
        self._to_draft_ahead = []
        rows = [seq.row(len(seq.proposed) + 1, seq.proposed) for seq in sequences]
        proposals = self._run_stack(rows)
        for sequence in sequences:
            self._stack.roll_back(sequence.key, len(sequence.tokens), sequence.proposed)
            proposal = proposals.get(sequence.key)
            if proposal is not None and len(proposal.token_ids) > 1:
                sequence.assumed = (*sequence.proposed, int(proposal.token_ids[0]))
                sequence.drafted_ahead = proposal.part(1)

    def _prefill(self) -> None:
        """Prefill a chunk of one sequence."""
        sequence = self._to_prefill[0]
        try:
            if self.slots.is_partial(sequence.draft) or not self._stack.prefill(sequence.row(1)):
                self._to_prefill.pop(0)
        except Exception:
            self._fail({sequence.key})

    def _update(self, client: int, row: DraftRequestRow) -> SequenceState | None:
        """Bring a sequence up to date; None if it must be sent whole, or has no free row."""
        own = self._sequences.setdefault(client, {})
        sequence = own.get(row.request_id)
        if row.num_cached_tokens == 0 and row.sampling is not None:
            self.release(client, [row.request_id])
            if self.num_sequences >= self._max_sequences:
                return None
            key = f"{client}/{row.request_id}"
            sequence = own[row.request_id] = SequenceState(key, row.draft, row.sampling)
        if (
            sequence is None
            or len(sequence.tokens) != row.num_cached_tokens
            or row.draft != sequence.draft
        ):
            return None
        if self._hidden is not None:
            count = num_states(row.num_cached_tokens, len(row.tokens))
            if not self._hidden.fits(row.hidden, count):
                return None
            self._hidden.extend(sequence.key, row.hidden)
        if sequence.drafted_ahead is not None:
            hit = sequence.assumed == row.tokens
            self._draft_ahead_policy.record(hit)
            if not hit:
                sequence.drafted_ahead = None
        sequence.tokens.extend(row.tokens)
        sequence.num_output = row.num_output
        sequence.proposed = ()
        return sequence

    def _run_stack(self, rows: list[DraftRow]) -> dict[str, RowProposal]:
        """Proposals by key, of rows that have some; a failure costs this round's drafts only."""
        rows = [row for row in rows if not self.slots.is_partial(row.draft)]
        if not rows:
            return {}
        try:
            proposal = self._stack.propose(rows, self._support, self._generator)
        except Exception:
            self._fail({row.request_id for row in rows})
            self.slots.fail_candidates({row.draft for row in rows})
            return {}
        self.failures += bool(self._stack.faulty)
        self.slots.fail_candidates(self._stack.faulty)
        return split_rows(rows, proposal)

    def _fail(self, keys: set[str]) -> None:
        """Drop sequences after a failure: they must be sent whole."""
        self.failures += 1
        logger.exception("%d sequences draft nothing this round", len(keys))
        for own in self._sequences.values():
            for request_id in [name for name, seq in own.items() if seq.key in keys]:
                self._drop(own.pop(request_id))

    def _queue_prefills(
        self, batch: Sequence[SequenceState], proposals: Mapping[str, RowProposal]
    ) -> None:
        """Queue the sequences of a batch that have no drafts yet."""
        requested = {seq.key for seq in batch}
        self._to_prefill = [seq for seq in self._to_prefill if seq.key not in requested]
        self._to_prefill += [seq for seq in batch if not (seq.released or seq.key in proposals)]

    def _queue_draft_ahead(
        self,
        sequences: Sequence[SequenceState | None],
        proposals: Mapping[str, RowProposal],
        allowed: bool,
    ) -> None:
        """Queue the sequences of a response for drafting ahead, if the policy says so."""
        draft_ahead = allowed and self._draft_ahead_policy.should_draft_ahead()
        for sequence in sequences:
            if sequence is None:
                continue
            sequence.drafted_ahead = None
            proposal = proposals.get(sequence.key)
            if proposal is None or not draft_ahead:
                continue
            tokens = tuple(proposal.token_ids.tolist())
            if len(sequence.tokens) + 2 * len(tokens) + 1 <= self._max_tokens:
                sequence.proposed = tokens
                self._to_draft_ahead.append(sequence)

    def _response(
        self,
        request: DraftRequest,
        sequences: Sequence[SequenceState | None],
        proposals: Mapping[str, RowProposal],
        hits: set[str],
    ) -> DraftResponse:
        """The response to one client, padded to its longest row."""
        return DraftResponse(
            epoch=self.epoch,
            round=request.round,
            weight_versions=self.slots.versions,
            unknown_rows=tuple(i for i, seq in enumerate(sequences) if seq is None or seq.released),
            num_ahead_hits=sum(seq is not None and seq.key in hits for seq in sequences),
            **pad_rows([None if seq is None else proposals.get(seq.key) for seq in sequences]),
        )

    def _all_sequences(self) -> list[SequenceState]:
        return [seq for own in self._sequences.values() for seq in own.values()]

    def _drop(self, sequence: SequenceState) -> None:
        self._stack.release(sequence.key)
        if self._hidden is not None:
            self._hidden.drop(sequence.key)
        sequence.released = True
        self._to_draft_ahead = [other for other in self._to_draft_ahead if other is not sequence]
        self._to_prefill = [other for other in self._to_prefill if other is not sequence]
