"""Weights of which a part was loaded: nobody drafts with them, and they are loaded again."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.actors.weights.slots import expert_of, is_candidate

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
