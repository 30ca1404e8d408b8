"""How much is drafted for whom: the engine's dealings with the controller, where there is one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from paceline.actors.decoding.acceptance import Use
from paceline.actors.decoding.goodput import GoodputController
from paceline.actors.decoding.mixtures import Mixtures
from paceline.actors.decoding.proposer import Proposer
from paceline.actors.decoding.reading import Reads
from paceline.actors.decoding.sequence import Sequence as RunningSequence

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
            wanted.append(sequence.budget(k))
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
