"""Weight updates of drafts: typed commands that are queued and applied between two rounds."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.actors.backoff import Backoff
from paceline.actors.engine.inference import inference
from paceline.actors.engine.sequence import Sequence
from paceline.actors.speculation.controller import SpeculationController
from paceline.actors.speculation.proposer import Proposer
from paceline.actors.weights.slots import candidate_of, expert_of, is_candidate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapWeights:
    """Load weights into a slot.

    Attributes:
        slot: an expert (``sql``), or its candidate (``sql@candidate``).
        weight_version: of the new weights.
        state: tensors by name.
    """

    slot: str
    weight_version: int
    state: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class RemoveCandidate:
    """Empty a candidate's slot; its requests continue with the stable weights."""

    slot: str


@dataclass(frozen=True, slots=True)
class AddExpert:
    """Add an expert as a copy of the initial weights of ``like``."""

    expert: str
    like: str


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Change the limits of speculation; None restores those of the start.

    Attributes:
        max_tokens: largest k that the controller may choose.
        probe_share: share of the rounds' time for probing drafts beyond what pays.
    """

    max_tokens: int | None
    probe_share: float | None


Update = SwapWeights | RemoveCandidate | AddExpert | SetLimits


class FailedCandidates:
    """Candidates whose load failed, until a request has reported each of them."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # by slot
        self._reporting: set[str] = set()  # slots that this round's requests report

    def add(self, slot: str, weight_version: int) -> None:
        """Note that the load of a candidate failed."""
        self._versions[slot] = weight_version

    def discard(self, slot: str) -> None:
        """Forget a slot: it gets another candidate, or the trial has ended."""
        self._versions.pop(slot, None)

    def assign_reports(self, batch: Iterable[Sequence]) -> None:
        """Have one request of each failed candidate's expert report the failure.

        Requests that report no outcome of their expert, or have reported a failure before, are
        skipped. The reports are kept until :meth:`confirm_reports`.
        """
        self._reporting.clear()
        for sequence in batch if self._versions else ():
            slot = candidate_of(expert_of(sequence.draft))
            version = self._versions.get(slot)
            if version is None or slot in self._reporting or not sequence.can_report_failure:
                continue
            sequence.failed_version = version
            self._reporting.add(slot)

    def confirm_reports(self) -> None:
        """Forget what this round's requests have reported; a failed round never gets here."""
        for slot in self._reporting:
            self._versions.pop(slot, None)
        self._reporting.clear()


_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


@dataclass(slots=True)
class _PartialLoad:
    """A load to retry: ``due_s`` is None until the first look at the clock."""

    update: SwapWeights
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_RETRY_S, _MAX_RETRY_S))
    due_s: float | None = None


class PartialLoads:
    """Stable slots whose load broke off part-way, for lack of memory say.

    Such a slot mixes old and new weights and must not draft. The new weights are kept, at the cost
    of as much memory as the draft, and loaded again after 1 s, then twice as long each time up to
    a minute, until a load succeeds: the next version may never come.

    A candidate's slot is not kept here: it is emptied, and its trial has failed.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _PartialLoad] = {}

    def add(self, update: SwapWeights, error: Exception) -> None:
        """Note a failed load, unless the slot is unchanged or a candidate's.

        Args:
            update: the load.
            error: KeyError and ValueError are raised before anything is copied.
        """
        if is_candidate(update.slot) or isinstance(error, (KeyError, ValueError)):
            return
        load = _PartialLoad(update)
        if (earlier := self._loads.get(update.slot)) is not None:
            load.backoff, load.due_s = earlier.backoff, earlier.due_s
        self._loads[update.slot] = load

    def discard(self, slot: str) -> None:
        """Forget a slot: it holds whole weights."""
        self._loads.pop(slot, None)

    def next_retry(self, now_s: float) -> SwapWeights | None:
        """The load to retry now, one slot at a time; None if none is due.

        Args:
            now_s: monotonic; a slot's first wait starts with the first call.
        """
        for load in self._loads.values():
            due = load.due_s is not None and now_s >= load.due_s
            if load.due_s is None or due:
                load.due_s = now_s + load.backoff.fail()
            if due:
                return load.update
        return None

    @property
    def next_retry_s(self) -> float | None:
        """Time of the next retry, by the clock of :meth:`next_retry`; None if none is known."""
        return min((m.due_s for m in self._loads.values() if m.due_s is not None), default=None)

    def affects(self, draft: str, loaded: Container[str]) -> bool:
        """Whether a draft proposes with partly loaded weights.

        Args:
            draft: an expert, its initial weights or its candidate.
            loaded: drafts with weights; an empty candidate's slot drafts as the stable one.
        """
        return (draft if draft in loaded else expert_of(draft)) in self._loads

    def __bool__(self) -> bool:
        return bool(self._loads)


_DONE = object()


class PendingUpdates:
    """The queue of updates, and their only dispatcher.

    :meth:`put` may be called from any thread, everything else from the engine's thread.

    Attributes:
        failed_candidates: candidates that could not be loaded here.
        partial_loads: stable slots that must not draft until a retry succeeds.
    """

    def __init__(
        self, proposer: Proposer, controller: SpeculationController, clock: Callable[[], float]
    ) -> None:
        """Start with an empty queue; ``clock`` gives monotonic seconds."""
        self._proposer = proposer
        self._controller = controller
        self._clock = clock
        self._queue: deque[Update] = deque()
        self._adding: Iterator[None] | None = None  # the rest of an AddExpert
        self.failed_candidates = FailedCandidates()
        self.partial_loads = PartialLoads()

    def __bool__(self) -> bool:
        """Whether there is something to apply."""
        return self._adding is not None or bool(self._queue)

    def put(self, update: Update) -> None:
        """Queue an update."""
        self._queue.append(update)

    @inference
    def apply(self, *, busy: bool) -> None:
        """Apply the queued updates in order, then retry a partial load if one is due.

        Args:
            busy: requests are running: of an AddExpert one part is applied, and the updates behind
                it wait for the next round.
        """
        while self:
            if self._adding is None:
                self._adding = self._dispatch(self._queue.popleft())
            elif next(self._adding, _DONE) is _DONE:
                self._adding = None
            elif busy:
                break
        retry = self.partial_loads.next_retry(self._clock()) if self.partial_loads else None
        if retry is not None:
            self._swap_weights(retry)

    def remove_candidate(self, slot: str) -> None:
        """Empty a candidate's slot at once."""
        self._proposer.remove_candidate(slot)
        self._controller.weights_changed(slot, None)

    def _dispatch(self, update: Update) -> Iterator[None] | None:
        """Apply an update; returns the parts of one that is applied over several rounds."""
        match update:
            case SwapWeights():
                self._swap_weights(update)
            case RemoveCandidate():
                self.failed_candidates.discard(update.slot)
                self.remove_candidate(update.slot)
            case AddExpert():
                return self._add_expert(update)
            case SetLimits():
                self._controller.set_limits(update.max_tokens, update.probe_share)
        return None

    def _swap_weights(self, update: SwapWeights) -> None:
        """Load weights; a failure is logged, fails a candidate's trial, and disables a stable slot.

        The slot is not disabled by weights that do not fit: it still holds its old weights.
        """
        slot, version = update.slot, update.weight_version
        self.failed_candidates.discard(slot)
        try:
            self._proposer.load_weights(slot, version, update.state)
        except Exception as error:
            logger.exception("draft %s: version %d was not loaded", slot, version)
            self.partial_loads.add(update, error)
            if is_candidate(slot):
                self.failed_candidates.add(slot, version)
                self.remove_candidate(slot)
            return
        self.partial_loads.discard(slot)
        self._controller.weights_changed(slot, version)

    def _add_expert(self, update: AddExpert) -> Iterator[None]:
        try:
            yield from self._proposer.add_expert(update.expert, update.like)
        except Exception:
            logger.exception("the expert %s could not be added here", update.expert)
