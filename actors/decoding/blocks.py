"""Who owns which block of key/value memory: bookkeeping without the memory itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 1..size: free, owned by one or several rows, or idle.

    An idle block has no owner but is remembered: what it holds may serve a later row. It counts as
    available, and is given up, the least recently released first, when no free block is left.
    """

    def __init__(self, size: int) -> None:
        """All ``size`` blocks are free."""
        self.size = size
        self._owners = [0] * (size + 1)
        self._free = list(range(size, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._remembered: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    def remembers(self, block: int) -> bool:
        """Whether a block is kept when its owners have gone."""
        return block in self._remembered

    def owners(self, block: int) -> int:
        """How many own a block."""
        return self._owners[block]

    def take(self, count: int) -> list[int]:
        """Become the only owner of ``count`` blocks; none of them is remembered any more.

        Raises:
            RuntimeError: where fewer are available; nothing has been taken then.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks are wanted, {self.available} are available")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._remembered.discard(block)
            self._owners[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Become a further owner of blocks that are owned or idle.

        Raises:
            RuntimeError: for a free block; those before it are shared then.
        """
        for block in blocks:
            if not self._owners[block] and block not in self._idle:
                raise RuntimeError(f"block {block} is free")
            self._idle.pop(block, None)
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Own blocks no more; of those that become idle, the first is given up first.

        Raises:
            RuntimeError: for a block without an owner.
        """
        for block in blocks:
            if not self._owners[block]:
                raise RuntimeError(f"block {block} has no owner")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._remembered:
                self._idle[block] = None
            else:
                self._free.append(block)

    def remember(self, blocks: Iterable[int]) -> None:
        """Keep what owned blocks hold when their owners have gone."""
        self._remembered.update(blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """Remember owned blocks no more: they are free when their owners have gone."""
        self._remembered.difference_update(blocks)

    def forget_all(self) -> None:
        """Remember no block; the idle ones are free."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._remembered.clear()

    def check_integrity(self) -> None:
        """RuntimeError where a block is lost, or in two places."""
        free, idle = set(self._free), set(self._idle)
        owned = {block for block in range(1, self.size + 1) if self._owners[block]}
        places = len(self._free) + len(idle) + len(owned)
        if places != self.size or free | idle | owned != set(range(1, self.size + 1)):
            raise RuntimeError(f"{places} places for {self.size} blocks")
        if self._remembered - idle - owned:
            raise RuntimeError(f"free blocks are remembered: {self._remembered - idle - owned}")
