"""Candidates that could not be loaded: their trials have failed, and somebody has to say so."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.actors.decoding.sequence import Sequence
from paceline.actors.weights.slots import candidate_of, expert_of


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
