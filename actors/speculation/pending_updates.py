"""Weights of which a part was loaded: nobody drafts with them, and they are loaded again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.engine.sequence import Sequence
from paceline.actors.weights.slots import candidate_of, expert_of, is_candidate

Change = Callable[[], Iterator[None] | None]
_DONE = object()


class Changes:
    """A queue of changes. One that takes long comes in parts, and those behind it wait."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self._queue: deque[Change] = deque()
        self._parts: Iterator[None] | None = None

    def __bool__(self) -> bool:
        """Whether there is something to do."""
        return self._parts is not None or bool(self._queue)

    def add(self, change: Change) -> None:
        """Queue a change; one that gives an iterator is done when that ends."""
        self._queue.append(change)

    @torch.inference_mode()
    def carry_out(self, *, busy: bool) -> None:
        """Carry out what is queued.

        Args:
            busy: requests run and wait for it: of a change in parts only one is done.
        """
        while self:
            if self._parts is None:
                self._parts = self._queue.popleft()()
            elif next(self._parts, _DONE) is _DONE:
                self._parts = None
            elif busy:
                return


class Refusals:
    """Candidates that a replica could not load, until their requests have reported it."""

    def __init__(self) -> None:
        """Begin with nothing refused."""
        self._candidates: dict[str, int] = {}
        self._telling: set[str] = set()  # candidates that this round's requests report

    def note(self, slot: str, weight_version: int) -> None:
        """A candidate's weights were not taken."""
        self._candidates[slot] = weight_version

    def over(self, slot: str) -> None:
        """The slot holds another candidate, or its trial has ended."""
        self._candidates.pop(slot, None)

    def tell(self, batch: Iterable[Sequence]) -> None:
        """Have a request of each refused candidate's expert report that it failed.

        It does so after the round, see :meth:`told`. One that says nothing of its expert's
        versions, or has reported a failure before, is passed over.
        """
        self._telling.clear()
        for sequence in batch if self._candidates else ():
            slot = candidate_of(expert_of(sequence.draft))
            version = self._candidates.get(slot)
            if version is None or slot in self._telling or not sequence.can_report_failure:
                continue
            sequence.failed_version = version
            self._telling.add(slot)

    def told(self) -> None:
        """The round has come to its end, and with it the reports: each is made once.

        Where it does not, they are left to the next one's requests.
        """
        for slot in self._telling:
            self._candidates.pop(slot, None)
        self._telling.clear()


Load = tuple[str, int, Mapping[str, Tensor]]
"""A slot, a weight_version, and its weights by name."""

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


@dataclass(slots=True)
class _Mixture:
    """What was to be loaded; ``due_s`` is when it is tried again, None until somebody looks."""

    weight_version: int
    state: Mapping[str, Tensor]
    wait_s: float = _FIRST_WAIT_S
    due_s: float | None = None


class Mixtures:
    """Stable slots in which a load broke off: memory ran out in the midst, say.

    They hold neither the old weights nor the new ones, which are kept, as much memory as the draft
    itself, until they are in place or others are: without another try the expert would be without
    drafts until its next version, on a plateau for ever. Tries cost rounds time, so they become
    rare: after 1 s, then twice as long each time up to a minute.

    A candidate's slot is none of this: it is emptied, and its trial has failed.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._mixtures: dict[str, _Mixture] = {}

    def note(
        self, slot: str, weight_version: int, state: Mapping[str, Tensor], error: Exception
    ) -> None:
        """A load failed.

        Args:
            slot: an expert's, or its candidate's.
            weight_version: that was to be loaded.
            state: its weights.
            error: KeyError and ValueError come before anything is copied: the slot is what it was.
        """
        if is_candidate(slot) or isinstance(error, (KeyError, ValueError)):
            return
        mixture = _Mixture(weight_version, state)
        if (earlier := self._mixtures.get(slot)) is not None:
            mixture.wait_s, mixture.due_s = earlier.wait_s, earlier.due_s
        self._mixtures[slot] = mixture

    def over(self, slot: str) -> None:
        """The slot holds whole weights."""
        self._mixtures.pop(slot, None)

    def due(self, now_s: float) -> Load | None:
        """What is to be loaded now, one slot's at a time; whoever asks does so.

        Args:
            now_s: monotonic; a slot's first wait begins with the first look at it.
        """
        for slot, mixture in self._mixtures.items():
            if mixture.due_s is None:
                mixture.due_s = now_s + mixture.wait_s
            elif now_s >= mixture.due_s:
                mixture.wait_s = min(2 * mixture.wait_s, _LONGEST_WAIT_S)
                mixture.due_s = now_s + mixture.wait_s
                return slot, mixture.weight_version, mixture.state
        return None

    @property
    def next_s(self) -> float | None:
        """When something is due, by the clock of the looks; None where nothing is known to be."""
        return min((m.due_s for m in self._mixtures.values() if m.due_s is not None), default=None)

    def spoil(self, draft: str, held: Container[str]) -> bool:
        """Whether a draft's proposals come from a mixture; ``held`` are the slots with weights."""
        return (draft if draft in held else expert_of(draft)) in self._mixtures

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._mixtures)
