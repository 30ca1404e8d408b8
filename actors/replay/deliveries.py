"""Records on their way to other processes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

_MOST = 16  # on their way to one receiver


class Deliveries:
    """What was sent and has not arrived, by receiver: one that hangs is not sent more and more.

    One thread sends; :meth:`latest` may be called by others.
    """

    def __init__(self, has_arrived: Callable[[Any], bool]) -> None:
        """Start with nothing; ``has_arrived`` says it of a reference, also if its receiver died."""
        self._has_arrived = has_arrived
        self._under_way: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._latest: dict[str, Any] = {}

    def accepts(self, receiver: str) -> bool:
        """Whether a receiver may be sent another one."""
        under_way = self._under_way[receiver]
        while under_way and self._has_arrived(under_way[0]):
            under_way.popleft()
        return len(under_way) < _MOST

    def sent(self, receiver: str, reference: Any) -> None:
        """Note the reference of an arrival."""
        self._under_way[receiver].append(reference)
        self._latest[receiver] = reference

    def latest(self) -> list[Any]:
        """Reference of the latest arrival at each receiver; they arrive in order."""
        return list(self._latest.copy().values())
