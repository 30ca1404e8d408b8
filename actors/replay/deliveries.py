"""Records on their way to other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _UnderWay:
    """References and sizes of what was sent to one receiver, and the latest reference."""

    sent: deque[tuple[Any, int]] = field(default_factory=deque)
    num_bytes: int = 0
    latest: Any = None


class Deliveries:
    """What was sent and has not arrived, by receiver: one that hangs is not sent more and more.

    One thread sends; :meth:`latest` may be called by others.
    """

    def __init__(self, has_arrived: Callable[[Any], bool], most_bytes: int) -> None:
        """Start with nothing.

        Args:
            has_arrived: of a reference, also if its receiver has died.
            most_bytes: on their way to one receiver; the last one sent may exceed it.
        """
        self._has_arrived = has_arrived
        self._most_bytes = most_bytes
        self._receivers: dict[str, _UnderWay] = {}

    def accepts(self, receiver: str) -> bool:
        """Whether a receiver may be sent something."""
        own = self._receivers.setdefault(receiver, _UnderWay())
        while own.sent and self._has_arrived(own.sent[0][0]):
            own.num_bytes -= own.sent.popleft()[1]
        return own.num_bytes < self._most_bytes

    def sent(self, receiver: str, reference: Any, num_bytes: int) -> None:
        """Note what was sent after :meth:`accepts`, by the reference of its arrival."""
        own = self._receivers[receiver]
        own.sent.append((reference, num_bytes))
        own.num_bytes += num_bytes
        own.latest = reference

    def latest(self) -> list[Any]:
        """Reference of the latest arrival at each receiver; they arrive in order."""
        return [own.latest for own in self._receivers.copy().values() if own.sent]
