"""How an expert's replicas come to share its targets: pure, told how many replicas there are."""

from __future__ import annotations


class LeaseSharing:
    """Which leases a replica ends so that replicas that came after it get some.

    A target keeps the replica that it got for as long as both live, so that a further one would
    stand idle. Where there are m replicas in place of n, each of the n keeps n in m of its leases,
    one at least; the targets of the others open new ones, which Serve gives to the replica with
    the fewest.
    """

    def __init__(self, replicas: int) -> None:
        """Begin without leases, beside so many replicas in all."""
        self._replicas = replicas
        self._leases: list[str] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._leases)

    def opened(self, name: str) -> None:
        """A target has got a lease."""
        self._leases.append(name)

    def closed(self, name: str) -> None:
        """It has ended; a second call is fine."""
        if name in self._leases:
            self._leases.remove(name)

    def to_end(self, replicas: int) -> list[str]:
        """The leases that are to end now, the newest of them; they count no more.

        Args:
            replicas: that serve now, this one included; 0: unknown.
        """
        before, self._replicas = self._replicas, replicas or self._replicas
        if not 0 < before < self._replicas:
            return []
        keep = max(1, len(self._leases) * before // self._replicas)
        self._leases, ending = self._leases[:keep], self._leases[keep:]
        return ending
