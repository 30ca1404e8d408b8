"""Changes that the registry announces, and the wake-up of its long polls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from paceline.actors.handles import Reference
from paceline.actors.weights.slots import candidate_of
from paceline.actors.weights.topics import TopicsView
from paceline.actors.weights.versions import TopicVersions

if TYPE_CHECKING:  # imports torch
    from paceline.actors.weights.flat_weights import FlatWeights

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """The weights of a slot.

    Attributes:
        weight_version: 0: initial weights in a stable slot, none in a candidate's.
        reference: ObjectRef of FlatWeights; None if there are none in the object store.
    """

    weight_version: int
    reference: Reference[FlatWeights] | None = None


@dataclass(frozen=True, slots=True)
class RegistryChanges:
    """What a subscriber does not know yet; false if there is nothing.

    Attributes:
        weights: by slot (``sql``, ``sql@candidate``).
        topics: the added topics, None if they are unchanged.
    """

    weights: Mapping[str, SlotWeights] = field(default_factory=dict)
    topics: TopicsView | None = None

    def __bool__(self) -> bool:
        return bool(self.weights) or self.topics is not None


class ChangeNotifier:
    """Wakes the long polls of any event loop."""

    def __init__(self) -> None:
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def notify(self) -> None:
        """Wake every waiter to look again."""
        for loop, event in self._waiters.copy():
            loop.call_soon_threadsafe(event.set)

    async def wait(self, look: Callable[[], T], timeout_s: float) -> T:
        """The result of ``look``, called again after the next change if it is false.

        Args:
            look: reads the present state.
            timeout_s: longest wait for a change.
        """
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiters.add(waiter)
        try:
            found = look()
            if not found:
                try:
                    await asyncio.wait_for(waiter[1].wait(), timeout_s)
                except TimeoutError:
                    return found
                found = look()
            return found
        finally:
            self._waiters.discard(waiter)


def changed_weights(
    known: Mapping[str, int],
    states: Mapping[str, TopicVersions],
    references: Mapping[str, Reference[FlatWeights]],
) -> dict[str, SlotWeights]:
    """Slots that differ from the known versions.

    Args:
        known: slot to weight_version; a missing slot has 0.
        states: topic to its versions.
        references: slot to the reference of its weights.

    Returns:
        stable versions above the known ones, and candidates other than the known ones.
    """
    changed: dict[str, SlotWeights] = {}
    for topic, state in states.items():
        slot, candidate = candidate_of(topic), state.candidate or 0
        if topic in references and state.stable > max(known.get(topic, 0), 0):
            changed[topic] = SlotWeights(state.stable, references[topic])
        if candidate != known.get(slot, 0):
            changed[slot] = SlotWeights(candidate, references[slot] if candidate else None)
    return changed
