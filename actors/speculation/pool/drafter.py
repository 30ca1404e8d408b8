"""One expert's sequences of all targets: what an expert's server does between two frames.

Drafting ahead. While the target verifies k drafts, the expert goes on as if all of them came
true: it guesses the bonus token and drafts k more behind it. If the sequence then arrives exactly
so, the answer is there at once; otherwise it is dropped. This changes no output law. Greedy and
seeded proposals are functions of the prefix. An unseeded proposal is a fresh sample from
q(. | assumed prefix), drawn by the expert's own generator after the assumed prefix was fixed;
whether the assumption comes true depends on the assumed tokens and on the target's own
randomness, never on the sample behind them. So given that it is used, it still is a sample from
q(. | prefix), independent of the target's later accept/reject draws, which is all that
speculative sampling asks for. A proposal ahead is offered to the very next question about its
sequence and then forgotten, and new weights drop all of them.

Prompts are read between the questions too: a question reads one small chunk and is answered, with
no drafts for those that are not read to the end, because a round waits for the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.pending_updates import PartialLoads, SwapWeights
from paceline.actors.speculation.pool.draft_ahead import AheadPolicy
from paceline.actors.speculation.pool.messages import Answer, Ask, AskRow, Float32, Int32
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import is_candidate


@dataclass(slots=True)
class Drafts:
    """One row's proposal: ``[k]`` tokens and probabilities, ``[k, S]`` supports."""

    token_ids: Int32
    token_probs: Float32
    support_ids: Int32
    support_probs: Float32

    def part(self, start: int, stop: int) -> Drafts:
        """Positions from ``start`` up to ``stop``."""
        at = slice(start, stop)
        return Drafts(
            self.token_ids[at], self.token_probs[at], self.support_ids[at], self.support_probs[at]
        )


@dataclass(slots=True)
class Known:
    """A sequence as the expert knows it.

    ``guess`` are the drafts last answered, from which drafting ahead goes on. ``ahead`` was
    drafted behind ``assumed``, the tokens that are to follow the present ones.
    """

    key: str
    draft: str
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    num_output: int = 0
    guess: tuple[int, ...] = ()
    assumed: tuple[int, ...] = ()
    ahead: Drafts | None = None

    def row(self, num_draft_tokens: int, further: tuple[int, ...] = ()) -> DraftRow:
        """What the stack is asked, with tokens behind the present ones."""
        return DraftRow(
            request_id=self.key,
            draft=self.draft,
            tokens=[*self.tokens, *further],
            num_output=self.num_output + len(further),
            num_draft_tokens=num_draft_tokens,
            sampling=self.sampling,
        )


def split(rows: Sequence[DraftRow], proposal: Proposal) -> dict[str, Drafts]:
    """The drafts of every row that has some."""
    counts = proposal.num_drafted.tolist()
    token_ids = proposal.token_ids.int().cpu().numpy()
    token_probs = proposal.token_probs.float().cpu().numpy()
    support_ids = proposal.support_ids.int().cpu().numpy()
    support_probs = proposal.support_probs.float().cpu().numpy()
    return {
        row.request_id: Drafts(
            token_ids[i, :count],
            token_probs[i, :count],
            support_ids[i, :count],
            support_probs[i, :count],
        )
        for i, (row, count) in enumerate(zip(rows, counts, strict=True))
        if count
    }


def padded(found: Sequence[Drafts | None]) -> dict[str, Any]:
    """Rows of different lengths as the arrays of an Answer, by their names; None is no drafts."""
    lengths = [0 if part is None else len(part.token_ids) for part in found]
    width = max((part.support_ids.shape[1] for part in found if part is not None), default=0)
    rows, steps = len(found), max(lengths, default=0)
    token_ids, token_probs = np.zeros((rows, steps), np.int32), np.zeros((rows, steps), np.float32)
    support_ids = np.zeros((rows, steps, width), np.int32)
    support_probs = np.zeros((rows, steps, width), np.float32)
    for i, part in enumerate(found):
        if part is not None:
            count, own = part.support_ids.shape
            token_ids[i, :count] = part.token_ids
            token_probs[i, :count] = part.token_probs
            support_ids[i, :count, :own] = part.support_ids
            support_probs[i, :count, :own] = part.support_probs
    return {
        "num_drafted": np.asarray(lengths, dtype=np.int32),
        "token_ids": token_ids,
        "token_probs": token_probs,
        "support_ids": support_ids,
        "support_probs": support_probs,
    }


class ExpertSlots:
    """Stable weights, a candidate's, and the initial ones, of one expert.

    Attributes:
        failed_candidate: weight_version of the last one that was given up; other threads read it.
        partial_loads: the stable slot, if a load of it broke off.
    """

    def __init__(self, stack: ExpertStack) -> None:
        """Take the stack whose slots they are."""
        self._stack = stack
        self.failed_candidate: int | None = None
        self.partial_loads = PartialLoads()

    @property
    def versions(self) -> dict[str, int]:
        """weight_version by slot; a candidate only where there is one."""
        return dict(self._stack.versions)

    def put(self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Put weights into a slot, or with None empty a candidate's.

        Raises:
            KeyError: for a slot that is not here.
            ValueError: for weights of another shape; a stable slot is what it was.
            Exception: whatever else loading raises, of memory too; a stable slot is a mixture then.
                After any of these a candidate's slot is empty, and its trial has failed.
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

    def give_up(self, drafts: Iterable[str]) -> None:
        """Empty the candidate's slot where it is among drafts that failed."""
        for draft in drafts:
            if is_candidate(draft) and draft in self._stack.versions:
                self.failed_candidate = self._stack.version(draft)
                self._stack.remove_candidate(draft)

    def spoiled(self, draft: str) -> bool:
        """Whether a draft's proposals would come from a mixture."""
        return bool(self.partial_loads) and self.partial_loads.affects(draft, self._stack.versions)


logger = logging.getLogger(__name__)


class SharedDrafter:
    """Answers the questions of several targets with one stack. Knows no sockets and no clock."""

    def __init__(
        self,
        stack: ExpertStack,
        expert: str,
        *,
        support: int,
        generator: torch.Generator,
        max_sequences: int,
        epoch: int,
        ahead: AheadPolicy,
    ) -> None:
        """Take the expert.

        Args:
            stack: of the expert and its initial weights; its prefill chunk is what a question
                may have to wait for.
            expert: the name whose weights may be swapped.
            support: the most tokens that a distribution may hold.
            generator: randomness of unseeded drafts.
            max_sequences: the stack's rows; a sequence beyond them drafts nothing.
            epoch: names this life of the process.
            ahead: whether drafting ahead pays.
        """
        self._stack = stack
        self.slots = ExpertSlots(stack)
        self._expert = expert
        self._support = support
        self._generator = generator
        self._max_sequences = max_sequences
        self._max_tokens = stack.runner.max_model_len
        self.epoch = epoch
        self.ahead = ahead
        self._known: dict[int, dict[str, Known]] = {}
        self._awaiting: list[Known] = []  # answered, and not yet drafted ahead
        self._unread: list[Known] = []  # their prompts are not read to the end
        self.failures = 0

    @property
    def num_sequences(self) -> int:
        """Sequences of all clients."""
        return sum(map(len, list(self._known.values())))  # also asked by other threads

    @property
    def may_draft_ahead(self) -> bool:
        """True where :meth:`draft_ahead` has something to do."""
        return bool(self._awaiting)

    @property
    def has_work(self) -> bool:
        """True where :meth:`work` has something to do."""
        return bool(self._awaiting or self._unread)

    def work(self) -> None:
        """Something useful while nobody asks, for a short while."""
        if self._awaiting:
            self.draft_ahead()
        else:
            self.read()

    def swap(
        self, weight_version: int, state: Mapping[str, Tensor] | None, slot: str | None = None
    ) -> None:
        """Take new weights of the expert, or with None empty its candidate's slot.

        Args:
            weight_version: theirs.
            state: name to tensor.
            slot: of the expert; None is the stable one.

        Raises:
            Exception: where they could not be loaded, see ExpertSlots.
        """
        draft = slot or self._expert
        try:
            self.slots.put(draft, weight_version, state)
        finally:  # a slot that could not be filled may be empty, or a mixture
            self._awaiting.clear()
            for known in self._all():
                known.ahead = None
            self._unread = [known for known in self._all() if known.draft == draft]

    def release(self, client: int, request_ids: Sequence[str]) -> None:
        """Forget sequences; unknown ones are fine."""
        for request_id in request_ids:
            known = self._known.get(client, {}).pop(request_id, None)
            if known is not None:
                self._drop(known)

    def forget(self, client: int) -> None:
        """Free everything that a client held."""
        self.release(client, list(self._known.get(client, ())))
        self._known.pop(client, None)

    def absorb(self, client: int, ask: Ask) -> None:
        """Take the tokens of a question whose answer nobody waits for any more."""
        for row in ask.rows:
            known = self._take(client, row)
            if known is not None:
                known.ahead = None  # it was for this question alone

    def answer(self, asks: Sequence[tuple[int, Ask]]) -> list[Answer]:
        """Draft for the questions of several clients in one batch.

        Args:
            asks: (client, question), one per client.

        Returns:
            the answers, in the same order.
        """
        self._awaiting.clear()
        asked = [[self._take(client, row) for row in ask.rows] for client, ask in asks]
        drafts: dict[str, Drafts] = {}
        rows: list[DraftRow] = []
        for (_, ask), sequences in zip(asks, asked, strict=True):
            for row, known in zip(ask.rows, sequences, strict=True):
                if known is None:
                    continue
                if known.ahead is not None:
                    drafts[known.key] = known.ahead.part(0, row.num_draft_tokens)
                else:
                    rows.append(known.row(row.num_draft_tokens))
        hits = set(drafts)
        drafts |= self._propose(rows)
        self._leave_unread([known for known in chain(*asked) if known is not None], drafts)
        answers = []
        for (_, ask), sequences in zip(asks, asked, strict=True):
            self._expect(sequences, drafts, ask.ahead)
            answers.append(self._word(ask, sequences, drafts, hits))
        return answers

    def draft_ahead(self) -> None:
        """Draft behind the last answers, as if all of them came true."""
        waiting = [known for known in self._awaiting if known.guess]
        self._awaiting = []
        rows = [known.row(len(known.guess) + 1, known.guess) for known in waiting]
        drafts = self._propose(rows)
        for known in waiting:
            self._stack.presume(known.key, len(known.tokens), known.guess)
            found = drafts.get(known.key)
            if found is not None and len(found.token_ids) > 1:
                known.assumed = (*known.guess, int(found.token_ids[0]))
                known.ahead = found.part(1, len(found.token_ids))

    def read(self) -> None:
        """Read a chunk of a prompt for which there was no time in a question."""
        if not self._unread:
            return
        known = self._unread[0]
        try:
            unread = not self.slots.spoiled(known.draft) and self._stack.read(known.row(1))
        except Exception:
            self._fail({known.key})
            return
        if not unread:
            self._unread.pop(0)

    def _take(self, client: int, row: AskRow) -> Known | None:
        """Bring a sequence up to date; None where it has to be sent whole, or has no room."""
        own = self._known.setdefault(client, {})
        known = own.get(row.request_id)
        if row.base == 0 and row.sampling is not None:
            self.release(client, [row.request_id])
            if self.num_sequences >= self._max_sequences:
                return None
            key = f"{client}/{row.request_id}"
            known = own[row.request_id] = Known(key, row.draft, row.sampling)
        if known is None or len(known.tokens) != row.base or row.draft != known.draft:
            return None
        if known.ahead is not None:
            came_true = known.assumed == row.tokens
            self.ahead.outcome(came_true)
            if not came_true:
                known.ahead = None
        known.tokens.extend(row.tokens)
        known.num_output = row.num_output
        known.guess = ()
        return known

    def _propose(self, rows: list[DraftRow]) -> dict[str, Drafts]:
        """Drafts by key; without those that have none yet. A failure costs drafts, no more."""
        rows = [row for row in rows if not self.slots.spoiled(row.draft)]
        if not rows:
            return {}
        try:
            proposal = self._stack.propose(rows, self._support, self._generator)
        except Exception:
            self._fail({row.request_id for row in rows})
            self.slots.give_up({row.draft for row in rows})
            return {}
        self.failures += bool(self._stack.faulty)
        self.slots.give_up(self._stack.faulty)
        return split(rows, proposal)

    def _fail(self, keys: set[str]) -> None:
        """After a failure nothing is known of these sequences: they must be sent whole."""
        self.failures += 1
        logger.exception("%s drafts nothing this round", self._expert)
        for own in self._known.values():
            for request_id in [name for name, known in own.items() if known.key in keys]:
                self._drop(own.pop(request_id))

    def _leave_unread(self, asked: Sequence[Known], drafts: Mapping[str, Drafts]) -> None:
        """Note whose prompts are to be read on: of those asked for, who has no drafts."""
        keys, alive = {known.key for known in asked}, {known.key for known in self._all()}
        self._unread = [known for known in self._unread if known.key not in keys]
        self._unread += [k for k in asked if k.key in alive and k.key not in drafts]

    def _expect(
        self, sequences: Sequence[Known | None], drafts: Mapping[str, Drafts], ahead: bool
    ) -> None:
        """Note what was answered, for drafting ahead."""
        worthwhile = ahead and self.ahead.worthwhile()
        for known in sequences:
            if known is None:
                continue
            known.ahead = None
            found = drafts.get(known.key)
            if found is None or not len(found.token_ids) or not worthwhile:
                continue
            guess = tuple(found.token_ids.tolist())
            if len(known.tokens) + 2 * len(guess) + 1 <= self._max_tokens:
                known.guess = guess
                self._awaiting.append(known)

    def _word(
        self,
        ask: Ask,
        sequences: Sequence[Known | None],
        drafts: Mapping[str, Drafts],
        hits: set[str],
    ) -> Answer:
        """The answer to one client, padded to its longest row."""
        alive = {known.key for known in self._all()}
        found = [None if known is None else drafts.get(known.key) for known in sequences]
        return Answer(
            epoch=self.epoch,
            round=ask.round,
            weight_versions=self.slots.versions,
            unknown=tuple(
                i for i, known in enumerate(sequences) if known is None or known.key not in alive
            ),
            ahead=sum(known is not None and known.key in hits for known in sequences),
            **padded(found),
        )

    def _all(self) -> list[Known]:
        return [known for own in self._known.values() for known in own.values()]

    def _drop(self, known: Known) -> None:
        self._stack.release(known.key)
        self._awaiting = [other for other in self._awaiting if other is not known]
        self._unread = [other for other in self._unread if other is not known]
