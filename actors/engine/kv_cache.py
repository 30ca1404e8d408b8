"""Key/value memory in blocks, and which request sits in which row."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


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


_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


class PrefixIndex:
    """Finds blocks by the tokens that they and all blocks before them hold.

    A block's key is the place of the block before it and its own tokens, compared as they are:
    two different prompts never meet. Places are never used twice, so what followed a forgotten
    block is not found through the block that has taken its memory.
    """

    def __init__(self, block_size: int) -> None:
        """Know of nothing yet; ``block_size`` is in tokens."""
        self._size = block_size
        self._places = _ROOT
        self._found: dict[_Key, tuple[int, int]] = {}  # place, block
        self._key_of: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._found)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix of whole blocks, in order."""
        place, blocks = _ROOT, []
        for chunk in self._chunks(tokens):
            found = self._found.get((place, chunk))
            if found is None:
                break
            place, block = found
            blocks.append(block)
        return blocks

    def add(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Learn what blocks hold.

        Args:
            tokens: from the beginning; a last part that fills no block is left out.
            blocks: where the keys and values of these tokens are.

        Returns:
            the blocks that are known by this call; where another block is known to hold the
            same, the new one is not needed.
        """
        place, added = _ROOT, []
        for chunk, block in zip(self._chunks(tokens), blocks, strict=False):
            key = (place, chunk)
            if key not in self._found:
                self.forget(block)  # what was before it may have been known elsewhere, and gone
                self._places += 1
                self._found[key] = self._places, block
                self._key_of[block] = key
                added.append(block)
            place, _ = self._found[key]
        return added

    def forget(self, block: int) -> None:
        """A block's memory goes to something else; unknown ones are fine."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._found[key]

    def forget_all(self) -> None:
        """Know of nothing any more."""
        self._found.clear()
        self._key_of.clear()

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._size + 1, self._size):
            yield tuple(tokens[start : start + self._size])


BLOCK_SIZE = 16
NOBODYS = 2  # blocks beside those that requests have: what padding writes goes there
# Padding behind a short row may reach beyond the context, by fewer tokens than this.
_OVERHANG = 64
_LINE = 64


def position_bytes(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes of one position's keys and values over all layers.

    Args:
        shapes: per layer (key/value heads, head dimension).
        dtype: of keys and values.
    """
    return sum(2 * heads * dim for heads, dim in shapes) * dtype.itemsize


class KVBlocks:
    """Keys and values of up to ``rows`` requests, each in blocks that it takes as it grows.

    ``keys[layer]`` and ``values[layer]`` are ``[blocks, block_size, heads, head_dim]`` in the
    model's dtype; ``tables`` is int32 ``[rows + 1, columns]`` on their device: column c of a row
    names the block of its positions ``c * block_size`` and on. Block 0 belongs to nobody: what
    padding writes goes there, and columns without a block of their own point to it, as do those
    beyond the capacity. Row ``rows`` pads batches and has a block of its own, the last: were what
    such rows write read by others, behind their masks, one number that is none would spoil them.

    Full blocks that are kept (:meth:`keep`) are shared by rows that begin with the same tokens
    (:meth:`begin`), and outlive their row until the memory is needed.

    Attributes:
        prompts: per row, and the one that pads, the length of its prompt in tokens.
        longest_shared: rows with longer prompts share no blocks, None for no such limit: their
            keys depend on how long the prompt is (``dynamic_rope.py``).
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        positions: int | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Allocate; on CPUs the system gives the memory only as it is written.

        Args:
            shapes: per layer (key/value heads, head dimension).
            rows: most requests at once.
            capacity: most positions of a row.
            dtype: of keys and values.
            device: where they live.
            positions: how many there is room for, over all rows, in whole blocks; None is enough
                for every row's capacity. Block 0 comes on top.
            block_size: positions of a block; a multiple of 16.

        Raises:
            ValueError: where a single row could not be served.
        """
        self.capacity, self.dtype, self.block_size = capacity, dtype, block_size
        self.rows = rows
        self.prompts = [0] * (rows + 1)
        self.longest_shared: int | None = None
        columns = -(-capacity // block_size)
        blocks = rows * columns if positions is None else -(-positions // block_size)
        if blocks < columns:
            raise ValueError(
                f"{blocks} blocks of {block_size} positions hold less than one request, which "
                f"may have {capacity} positions"
            )
        self.pool = BlockPool(blocks)
        self._index = PrefixIndex(block_size)
        self._blocks: list[list[int]] = [[] for _ in range(rows)]
        # Zeros, not empty: a masked position must not hold a NaN (0 x NaN is NaN).
        self.keys, self.values = (
            [_zeros((blocks + NOBODYS, block_size, *shape), dtype, device) for shape in shapes]
            for _ in range(2)
        )
        host = torch.zeros(rows + 1, columns - (-_OVERHANG // block_size), dtype=torch.int32)
        host[rows] = blocks + 1
        self.tables = host.to(device)
        self._host, self._host_tables = host.numpy(), host
        self._stale = False

    @property
    def device(self) -> torch.device:
        """Where keys and values live."""
        return self.tables.device

    @property
    def attended_dtype(self) -> torch.dtype:
        """In which dtype torch attends: CPUs do it in float32 several times faster than in half."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def blocks(self, row: int) -> tuple[int, ...]:
        """The blocks that a row holds, shared ones included."""
        return tuple(self._blocks[row])

    def holds(self, row: int, length: int) -> bool:
        """Whether a row has blocks for its first ``length`` positions, capacity at most."""
        return self._columns(length) <= len(self._blocks[row])

    def reserve(self, row: int, length: int) -> bool:
        """Have blocks for a row's first ``length`` positions, capacity at most.

        Returns:
            False where there are not enough; nothing has changed then.
        """
        held = self._blocks[row]
        lacking = self._columns(length) - len(held)
        if lacking > self.pool.available:
            return False
        if lacking > 0:
            self._take(row, lacking)
        return True

    def begin(
        self, row: int, tokens: Sequence[int], length: int, spare: int = 0, prompt: int = 0
    ) -> int | None:
        """Give an empty row blocks: kept ones that hold what it begins with, and free ones.

        Args:
            row: holds nothing yet.
            tokens: whose keys and values need not be computed again where they are known.
            length: positions to have blocks for.
            spare: blocks that must be left.
            prompt: how many tokens of the row are its prompt.

        Returns:
            how many positions are computed already; None where there are not enough blocks,
            and nothing has changed.
        """
        assert not self._blocks[row]
        self.prompts[row] = prompt
        known = self._index.match(tokens) if self._shares(row) else []
        lacking = max(0, self._columns(length) - len(known))
        idle = sum(not self.pool.owners(block) for block in known)
        if lacking > self.pool.available - idle - spare:
            return None
        self.pool.share(known)
        self._append(row, known)
        if lacking:
            self._take(row, lacking)
        return len(known) * self.block_size

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Let later rows begin with a row's full blocks, up to the first that is not finite.

        Args:
            row: whose positions 0..len(tokens)-1 are computed and final.
            tokens: those at these positions.
        """
        if not self._shares(row):
            return
        full = self._blocks[row][: len(tokens) // self.block_size]
        unknown = [block for block in full if not self.pool.remembers(block)]
        broken = set(self._broken(unknown))
        end = next((i for i, block in enumerate(full) if block in broken), len(full))
        self.pool.remember(self._index.add(tokens[: end * self.block_size], full[:end]))

    def release(self, row: int) -> None:
        """Free a row; what was kept stays as long as nobody needs the memory."""
        # The beginning is what most have in common: it goes last.
        self.pool.release(reversed(self._blocks[row]))
        self._blocks[row] = []
        self._host[row] = 0
        self._stale = True

    def wipe(self, row: int) -> None:
        """Write zeros over the blocks that a row alone owns and those of padding; forget them.

        For a row whose numbers are not finite: no later row starts with them or reads them. A
        block that other rows share was finite when it was kept.
        """
        own = [block for block in self._blocks[row] if self.pool.owners(block) == 1]
        self.pool.forget(own)
        for block in own:
            self._index.forget(block)
        at = torch.tensor([0, self.pool.size + 1, *own], device=self.device)
        for part in (*self.keys, *self.values):
            part[at] = 0

    def forget_all(self) -> None:
        """Keep nothing for later rows."""
        self._index.forget_all()
        self.pool.forget_all()

    def sync(self) -> None:
        """Bring ``tables`` up to date on another device; before a forward, never within one.

        A copy in place, so that what was captured (CUDA graphs) sees it.
        """
        if self._stale and self.tables is not self._host_tables:
            self.tables.copy_(self._host_tables, non_blocking=True)
        self._stale = False

    def _broken(self, blocks: Sequence[int]) -> list[int]:
        """Those of the blocks that hold a number which is not finite."""
        if not blocks:
            return []
        at = torch.tensor(blocks, device=self.device)
        total = torch.zeros(len(blocks), device=self.device)
        for part in (*self.keys, *self.values):
            total += part[at].flatten(1).sum(dim=1, dtype=torch.float32)
        sums = total.tolist()
        return [b for b, one in zip(blocks, sums, strict=True) if not math.isfinite(one)]

    def _shares(self, row: int) -> bool:
        return self.longest_shared is None or self.prompts[row] <= self.longest_shared

    def _columns(self, length: int) -> int:
        return -(-min(length, self.capacity) // self.block_size)

    def _take(self, row: int, count: int) -> None:
        taken = self.pool.take(count)
        for block in taken:
            self._index.forget(block)
        self._append(row, taken)

    def _append(self, row: int, blocks: Sequence[int]) -> None:
        held = self._blocks[row]
        self._host[row, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)
        self._stale = True


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on CPUs such that the system gives a page only when it is written.

    (``torch.zeros`` writes them all.) Rows begin on cache lines.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


class RowTable:
    """Which request sits in which row; a request keeps its row until it is released."""

    def __init__(self, rows: int) -> None:
        self.limit = rows
        self._row_of: dict[Hashable, int] = {}
        self._free = list(range(rows))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._row_of

    @property
    def full(self) -> bool:
        """True where no further request fits."""
        return not self._free

    def row(self, request: Hashable) -> int:
        """The row of a request; KeyError if it has none."""
        return self._row_of[request]

    def add(self, request: Hashable) -> int:
        """Give a request the lowest free row; RuntimeError where none is free or it has one."""
        if self.full:
            raise RuntimeError(f"all {self.limit} rows are taken")
        if request in self._row_of:
            raise RuntimeError(f"request {request!r} already has a row")
        row = self._row_of[request] = heapq.heappop(self._free)
        return row

    def release(self, request: Hashable) -> int:
        """Free a request's row and return it; KeyError if it has none."""
        row = self._row_of.pop(request)
        heapq.heappush(self._free, row)
        return row
