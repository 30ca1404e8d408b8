"""The engine's side of speculation: how much to draft, for whom, and what came of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.actors.engine.sequence import Sequence as RunningSequence
from paceline.actors.engine.stats import RoundMeter
from paceline.actors.speculation.costs import Reads
from paceline.actors.speculation.goodput import GoodputController, Use
from paceline.actors.speculation.pending_updates import Mixtures, Refusals
from paceline.actors.speculation.proposer import DraftRow, Proposer
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import is_candidate

logger = logging.getLogger(__name__)


class Choosing:
    """Asks the controller for k and tells it how rounds went.

    It is there for speed alone: where it fails nothing is drafted or it knows less, and no answer
    notices.
    """

    def __init__(self, controller: GoodputController | None, proposer: Proposer) -> None:
        """Put the parts together.

        Args:
            controller: chooses for sequences that have no number of their own; None: they do
                not draft.
            proposer: knows what has been read.
        """
        self._controller = controller
        self._proposer = proposer
        self.failures = 0

    def limit(self, max_tokens: int | None, probe_share: float | None) -> None:
        """Other limits, see GoodputController."""
        self._tell(lambda controller: controller.limit(max_tokens, probe_share), "other limits")

    def swapped(self, draft: str) -> None:
        """A draft has other weights."""
        self._tell(lambda controller: controller.swapped(draft), "new weights")

    def chosen(self, drafts: Sequence[str]) -> tuple[dict[str, int], float | None]:
        """The present k of these drafts, and the tokens per second that are expected."""
        if self._controller is None:
            return {}, None
        return {d: self._controller.chosen(d) for d in drafts}, self._controller.predicted

    def ended(self, sequence: RunningSequence) -> None:
        """Note a request that has come to its end."""
        if sequence.num_speculative_tokens is None:
            lengths = len(sequence.request.prompt_token_ids), sequence.num_output
            self._tell(lambda controller: controller.ended(*lengths), "an end")

    def wanted(
        self,
        batch: Sequence[RunningSequence],
        coming: Sequence[RunningSequence],
        mixtures: Mixtures,
    ) -> list[int]:
        """Tokens to draft per row: the request's own number, or the controller's choice.

        Where the controller chooses, and the draft has the prompt to read yet, the first token
        comes by itself: who waits for it is not to wait for that.

        Args:
            batch: B sequences.
            coming: those whose prompts are being read; the choice is made for them too.
            mixtures: who would draft with one drafts nothing.
        """
        begin = {s.request_id for s in batch if self._controller and self._begins(s)}
        plan = self._plan(batch, coming, begin)
        held: Container[str] = self._proposer.drafts() if mixtures else ()
        wanted = []
        for sequence in batch:
            k = sequence.num_speculative_tokens
            if k is None:
                k = 0 if sequence.request_id in begin else plan.get(use_of(sequence), 0)
            if mixtures and mixtures.spoil(sequence.draft, held):
                k = 0
            wanted.append(sequence.draft_budget(k))
        return wanted

    def took(
        self,
        batch: Sequence[RunningSequence],
        drafted: list[int],
        accepted: list[int],
        times: tuple[float, float],
        asked: bool,
    ) -> float | None:
        """Tell of a round; what plain decoding would take for its tokens, None where unknown.

        Args:
            batch: B sequences.
            drafted: tokens per row.
            accepted: of these.
            times: seconds of the whole round, and of drafting in it.
            asked: whether the proposer was, and may have read.
        """
        if self._controller is None:
            return None
        try:
            reads = self._proposer.reads if asked else Reads()
            self._teach(self._controller, batch, drafted, accepted, times, reads)
            return self._controller.plain_seconds(len(batch), len(batch) + sum(accepted))
        except Exception:
            self._complain("the controller was not told of a round")
            return None

    def _tell(self, tell: Callable[[GoodputController], None], what: str) -> None:
        """Tell the controller, where there is one, in the midst of what must not fail."""
        if self._controller is None:
            return
        try:
            tell(self._controller)
        except Exception:
            self._complain(f"the controller was not told of {what}")

    def _teach(
        self,
        controller: GoodputController,
        batch: Sequence[RunningSequence],
        drafted: list[int],
        accepted: list[int],
        times: tuple[float, float],
        reads: Reads,
    ) -> None:
        for sequence, tried, taken in zip(batch, drafted, accepted, strict=True):
            controller.accepted(use_of(sequence), tried, taken)
        active = [s.draft for s, tried in zip(batch, drafted, strict=True) if tried]
        steps = max(drafted)
        timed_steps = 0 if self._proposer.waited_in_vain else steps
        total, drafting_s = times
        sizes = (len(active), len(set(active)), timed_steps)
        controller.took(len(batch), steps + 1, total - drafting_s, sizes, drafting_s, reads)

    def _plan(
        self,
        batch: Sequence[RunningSequence],
        coming: Sequence[RunningSequence],
        begin: Container[str],
    ) -> Mapping[Use, int]:
        both = (*batch, *coming)
        free = Counter(use_of(s) for s in both if s.num_speculative_tokens is None)
        if not free or self._controller is None:
            return {}
        others = len(both) - free.total()
        later = (*coming, *(s for s in batch if s.request_id in begin))
        reading = Counter(use_of(s) for s in later if s.num_speculative_tokens is None)
        try:
            return self._controller.plan(free, others, self._unread_of(both), reading)
        except Exception:
            self._complain("the controller chose nothing")
            return {}

    def _begins(self, sequence: RunningSequence) -> bool:
        """Whether a sequence has no token yet, and a draft that does not know its prompt."""
        if sequence.num_output or sequence.num_speculative_tokens is not None:
            return False
        return self._proposer.lacks(sequence.request_id, sequence.draft, len(sequence.tokens)) > 0

    def _unread_of(self, batch: Sequence[RunningSequence]) -> Callable[[], dict[Use, float]]:
        """Per use: seconds of what it has to read, for each token that will be emitted yet."""
        assert self._controller is not None
        reading = self._controller.reading

        def unread() -> dict[Use, float]:
            seconds: dict[Use, float] = {}
            left: dict[Use, float] = {}
            for s in batch:
                if s.num_speculative_tokens is None:
                    lacking = self._proposer.lacks(s.request_id, s.draft, len(s.tokens))
                    own = reading.seconds(1.0, lacking) if lacking else 0.0
                    use = use_of(s)
                    seconds[use] = seconds.get(use, 0.0) + own
                    left[use] = left.get(use, 0.0) + reading.left(s.num_output, s.max_tokens)
            return {use: seconds[use] / tokens for use, tokens in left.items()}

        return unread

    def _complain(self, what: str) -> None:
        """Count a failure, and log it ever more rarely: it may come in every round."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.exception("%s (for the %d. time)", what, self.failures)


def use_of(sequence: RunningSequence) -> Use:
    """What a sequence's draft is judged by."""
    return Use(sequence.draft, sampled=not sequence.request.sampling.greedy)


_LONGEST_REST = 256


class Drafting:
    """Asks the proposer for drafts and tells the controller how rounds went.

    A proposer that fails costs the round its drafts, never an answer.
    """

    def __init__(
        self,
        proposer: Proposer,
        controller: GoodputController | None,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        """Put the parts together.

        Args:
            proposer: where draft tokens come from.
            controller: chooses for sequences that have no number of their own; None: they do
                not draft.
            device: the target's.
            clock: seconds, monotonic.
        """
        self._proposer = proposer
        self._choosing = Choosing(controller, proposer)
        self._device = device
        self._clock = clock
        self._began = 0.0
        self._drafting_s = 0.0
        self._asked = False
        self._failures = 0
        self.meter = RoundMeter()
        self._rest = 0  # rounds until a proposer that failed is asked again
        self._next_rest = 1
        self._versions: dict[str, int] = {}
        self._mixtures = Mixtures()
        self._refusals = Refusals()
        self._hidden_drafts = proposer.hidden_drafts

    @property
    def failures(self) -> int:
        """Rounds in which drafting or choosing failed."""
        return self._failures + self._choosing.failures

    def drafts(self) -> dict[str, int]:
        """Every draft that a request may name, with its weight_version."""
        return self._proposer.drafts()

    def limit(self, max_tokens: int | None, probe_share: float | None) -> None:
        """Other limits of the controller, where there is one; see GoodputController."""
        self._choosing.limit(max_tokens, probe_share)

    def release(self, request_id: str) -> None:
        """Forget a sequence."""
        self._proposer.release(request_id)

    def enlist(self, expert: str, like: str) -> Iterator[None]:
        """Take a further expert in, a part at a time, see Proposer; what fails is logged."""
        try:
            yield from self._proposer.enlist(expert, like)
        except Exception:
            logger.exception("the expert %s could not be added here", expert)

    def swap(self, expert: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Put new weights in place, or with None empty a candidate's slot.

        Weights that do not fit, or for which memory runs out, are logged and left: a candidate's
        trial has failed then. An expert whose weights are a mixture drafts nothing, see
        :meth:`mend`.
        """
        self._refusals.over(expert)
        if state is None:
            self._withdraw(expert)
            return
        try:
            self._proposer.swap(expert, weight_version, state)
        except Exception as error:
            logger.exception("draft %s: version %d was not taken", expert, weight_version)
            self._mixtures.note(expert, weight_version, state, error)
            if is_candidate(expert):
                self._refusals.note(expert, weight_version)
                self._withdraw(expert)
            return
        self._mixtures.over(expert)
        self._versions[expert] = weight_version
        self._choosing.swapped(expert)

    def mend(self) -> None:
        """Between two rounds: load weights again that were loaded in part, where it is time."""
        again = self._mixtures.due(self._clock()) if self._mixtures else None
        if again is not None:
            with torch.inference_mode():
                self.swap(*again)

    def _withdraw(self, candidate: str) -> None:
        self._proposer.withdraw(candidate)
        self._versions.pop(candidate, None)
        self._choosing.swapped(candidate)  # its requests draft with the stable weights now

    def propose(
        self, batch: Sequence[RunningSequence], coming: Sequence[RunningSequence] = ()
    ) -> Proposal:
        """Draft tokens for the batch; starts the round's clock.

        Args:
            batch: B sequences.
            coming: those whose prompts are being read; they will decode in a moment, so the
                choice of k is made for them too.
        """
        self._began = self._clock()
        self._refusals.tell(batch)
        wanted = self._choosing.wanted(batch, coming, self._mixtures)
        indices = [i for i, k in enumerate(wanted) if k > 0]
        proposal = Proposal.empty(len(batch), self._device)
        self._asked = bool(indices) and not self._resting()
        if self._asked:
            rows = [self._row(batch[i], wanted[i]) for i in indices]
            proposal = self._ask(rows, proposal, indices, batch)
            self._note_versions([batch[i] for i in indices])
        self._drafting_s = self._clock() - self._began
        return proposal

    def reads_hidden(self, batch: Iterable[RunningSequence]) -> bool:
        """Whether a draft of the batch reads the target's hidden states."""
        return bool(self._hidden_drafts) and any(
            s.request.draft in self._hidden_drafts and s.num_speculative_tokens != 0 for s in batch
        )

    def saw(self, batch: Sequence[RunningSequence], hidden: Tensor, num_accepted: Tensor) -> None:
        """Keep the hidden states that the round's final tokens came from.

        Args:
            batch: B sequences.
            hidden: ``[B, k + 1, H]`` of the verified positions.
            num_accepted: int64 ``[B]``, draft tokens before the final one.
        """
        at = torch.arange(len(batch), device=hidden.device)
        for sequence, state in zip(batch, hidden[at, num_accepted], strict=True):
            sequence.hidden = state

    def finished(
        self, batch: Sequence[RunningSequence], drafted: list[int], accepted: list[int]
    ) -> None:
        """Note a round that ends now: what was drafted and accepted, per row.

        The controller learns of all that was verified; the meter counts what was emitted.
        """
        self._refusals.told()
        total, tokens = self._clock() - self._began, len(batch) + sum(accepted)
        times = total, self._drafting_s
        plain_s = self._choosing.took(batch, drafted, accepted, times, self._asked)
        if any(s.request.background for s in batch):  # then all are, and nobody waits for them
            return
        self.meter.took(total, self._drafting_s, tokens, plain_s)
        for s in batch:
            if s.num_speculative_tokens != 0:
                self.meter.row(s.request.topic, s.draft, s.weight_version, *s.last_round)

    def chosen(self) -> tuple[dict[str, int], float | None]:
        """The controller's present k by draft, and the tokens per second that it expects."""
        return self._choosing.chosen(sorted({draft for _, draft in list(self.meter.counts)}))

    def ended(self, sequence: RunningSequence) -> None:
        """Note a request that has come to its end."""
        self._choosing.ended(sequence)

    def _resting(self) -> bool:
        """A proposer that fails is asked again after 1, 2, 4 ... rounds."""
        self._rest = max(0, self._rest - 1)
        return self._rest > 0

    def _row(self, sequence: RunningSequence, k: int) -> DraftRow:
        return DraftRow(
            request_id=sequence.request_id,
            draft=sequence.draft,
            tokens=sequence.tokens,
            num_output=sequence.num_output,
            num_draft_tokens=k,
            sampling=sequence.request.sampling,
            hidden=sequence.hidden,
        )

    def _note_versions(self, sequences: Sequence[RunningSequence]) -> None:
        """Note with which weights was proposed: a proposer may take new ones by itself."""
        for sequence in sequences:
            draft, version = sequence.draft, self._proposer.version(sequence.draft)
            sequence.set_draft_version(version)
            if self._versions.get(draft, version) != version:
                self._choosing.swapped(draft)
            self._versions[draft] = version

    def _ask(
        self,
        rows: list[DraftRow],
        nothing: Proposal,
        indices: list[int],
        batch: Sequence[RunningSequence],
    ) -> Proposal:
        try:
            proposal = self._proposer.propose(rows).scatter(indices, len(batch))
            self._next_rest = 1 if self._look_at_faults(rows, batch) else self._next_rest
            return proposal
        except Exception:
            self._failures += 1
            logger.exception("the round goes on without speculation")
            for row in rows:
                self._proposer.release(row.request_id)
            if not self._blame(frozenset(row.draft for row in rows), batch):
                self._rest_longer()
            return nothing

    def _look_at_faults(self, rows: list[DraftRow], batch: Sequence[RunningSequence]) -> bool:
        """Note drafts that gave no probabilities; False where there is nobody else to ask."""
        faulty = self._proposer.faulty
        if not faulty:
            return True
        self._failures += 1
        logger.warning("no probabilities of %s", sorted(faulty))
        if self._blame(faulty, batch) or any(row.draft not in faulty for row in rows):
            return True
        self._rest_longer()
        return False

    def _rest_longer(self) -> None:
        self._rest = self._next_rest + 1
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)

    def _blame(self, drafts: frozenset[str], batch: Sequence[RunningSequence]) -> bool:
        """Give up the candidates among drafts that failed; whether there were some.

        Nobody else shall pay for a candidate: the next round does without it.
        """
        held = self._proposer.drafts()  # a slot that is empty already drafts as the stable one
        blamed = {d: held[d] for d in drafts if is_candidate(d) and d in held}
        for draft in blamed:
            self._withdraw(draft)
        for sequence in batch:
            if sequence.draft in blamed:
                sequence.failed_version = blamed[sequence.draft]
        return bool(blamed)
