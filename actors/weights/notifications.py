"""Who waits for new weights, and what is new to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paceline.actors.weights.slots import candidate_of
from paceline.actors.weights.versions import TopicVersions

# slot to (weight_version, [reference]); the reference lies in a list so that Ray leaves it alone
News = dict[str, tuple[int, list[Any]]]

T = TypeVar("T")


class Announcements:
    """Wakes the long polls of any event loop."""

    def __init__(self) -> None:
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def wake(self) -> None:
        """There may be news for everybody."""
        for loop, event in self._waiters:
            loop.call_soon_threadsafe(event.set)

    async def wait(self, look: Callable[[], dict[str, T]], timeout_s: float) -> dict[str, T]:
        """What ``look`` finds now or after the next change; empty after ``timeout_s`` seconds."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiters.add(waiter)
        try:
            news = look()
            if not news:
                try:
                    await asyncio.wait_for(waiter[1].wait(), timeout_s)
                except TimeoutError:
                    return {}
                news = look()
            return news
        finally:
            self._waiters.discard(waiter)


def news_for(
    known: Mapping[str, int], states: Mapping[str, TopicVersions], references: Mapping[str, Any]
) -> News:
    """What differs from the known versions.

    Args:
        known: slot to the weight_version that the caller has; a missing slot has 0.
        states: topic to its versions.
        references: slot to the reference of its weights.

    Returns:
        stable versions above the known ones, and candidates other than them; (0, []) where there
        is no candidate any more.
    """
    news: News = {}
    for topic, state in states.items():
        slot = candidate_of(topic)
        if topic in references and state.stable > max(known.get(topic, 0), 0):
            news[topic] = (state.stable, [references[topic]])
        if (state.candidate or 0) != known.get(slot, 0):
            news[slot] = (state.candidate or 0, [references[slot]] if state.candidate else [])
    return news
