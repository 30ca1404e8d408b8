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
        """Have the next request of a refused candidate's expert report that it failed, once."""
        for sequence in batch if self._candidates else ():
            version = self._candidates.pop(candidate_of(expert_of(sequence.draft)), None)
            if version is not None:
                sequence.failed_version = version

    def __bool__(self) -> bool:
        """Whether anything is refused."""
        return bool(self._spoiled or self._candidates)
