"""Weights that could not be taken: who drafts nothing for it, and whose trial has failed."""

from __future__ import annotations

from collections.abc import Container, Iterable

from paceline.actors.decoding.sequence import Sequence
from paceline.actors.weights.slots import candidate_of, expert_of, is_candidate


class Refusals:
    """What a replica could not load, until other weights are in its place."""

    def __init__(self) -> None:
        """Begin with nothing refused."""
        self._spoiled: set[str] = set()
        self._candidates: dict[str, int] = {}
        self._telling: set[str] = set()  # candidates that this round's requests report

    def note(self, slot: str, weight_version: int, *, untouched: bool) -> None:
        """Weights were not taken.

        Args:
            slot: an expert's, or its candidate's.
            weight_version: that was refused.
            untouched: the slot holds what it held; else a mixture, which nobody shall draft with.
        """
        if is_candidate(slot):
            self._candidates[slot] = weight_version
        elif not untouched:
            self._spoiled.add(slot)

    def over(self, slot: str) -> None:
        """The slot holds whole weights again, or a candidate's is empty."""
        self._spoiled.discard(slot)
        self._candidates.pop(slot, None)

    def spoils(self, draft: str, held: Container[str]) -> bool:
        """Whether a draft's proposals come from a mixture; ``held`` are the slots with weights."""
        return (draft if draft in held else expert_of(draft)) in self._spoiled

    def tell(self, batch: Iterable[Sequence]) -> None:
        """Have a request of each refused candidate's expert report that it failed.

        It does so after the round, see :meth:`told`. One that says nothing of its expert's
        versions, or has reported a failure before, is passed over.
        """
        self._telling.clear()
        for sequence in batch if self._candidates else ():
            slot = candidate_of(expert_of(sequence.draft))
            version = self._candidates.get(slot)
            if version is None or slot in self._telling or not sequence.may_tell_failure:
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

    def __bool__(self) -> bool:
        """Whether anything is refused."""
        return bool(self._spoiled or self._candidates)
