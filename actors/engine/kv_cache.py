"""Paged KV cache with prefix sharing, and the rows of running requests."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.engine.transfer import device_tensor


class BlockAllocator:
    """Reference-counted allocator of the blocks 1..size.

    A block is free, referenced by one or several rows, or idle: cached and without references.
    Idle blocks count as available; they are evicted, the least recently freed first, when no free
    block is left.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ref_counts = [0] * (size + 1)
        self._free = list(range(size, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cached: set[int] = set()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    def is_cached(self, block: int) -> bool:
        """Whether a block outlives its references."""
        return block in self._cached

    def ref_count(self, block: int) -> int:
        """Number of rows that use a block."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` uncached blocks with one reference each, evicting idle ones if needed.

        Raises:
            RuntimeError: fewer are available; nothing has been allocated then.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks are wanted, {self.num_available} are available")
        allocated = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._cached.discard(block)
            self._ref_counts[block] = 1
            allocated.append(block)
        return allocated

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these referenced or idle blocks.

        Raises:
            RuntimeError: a block is free; those before it have been touched then.
        """
        for block in blocks:
            if not self._ref_counts[block] and block not in self._idle:
                raise RuntimeError(f"block {block} is free")
            self._idle.pop(block, None)
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block; the first to become idle is evicted first.

        Raises:
            RuntimeError: a block has no reference.
        """
        for block in blocks:
            if not self._ref_counts[block]:
                raise RuntimeError(f"block {block} has no reference")
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._cached:
                self._idle[block] = None
            else:
                self._free.append(block)

    def cache(self, blocks: Iterable[int]) -> None:
        """Make referenced blocks idle instead of free once their references are gone."""
        self._cached.update(blocks)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Undo :meth:`cache` for referenced blocks."""
        self._cached.difference_update(blocks)

    def reset_cache(self) -> None:
        """Free all idle blocks and cache none."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._cached.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError if a block is lost or in two states."""
        free, idle = set(self._free), set(self._idle)
        used = {block for block in range(1, self.size + 1) if self._ref_counts[block]}
        count = len(self._free) + len(idle) + len(used)
        if count != self.size or free | idle | used != set(range(1, self.size + 1)):
            raise RuntimeError(f"{count} blocks in a state, of {self.size}")
        if self._cached - idle - used:
            raise RuntimeError(f"free blocks are cached: {self._cached - idle - used}")


# The node before a block, or the salt before the first one, and the block's tokens.
_Key = tuple[int | str, tuple[int, ...]]


class PrefixCache:
    """Index of blocks by the tokens that they and all blocks before them hold.

    The key of a block is the node of the block before it and its own tokens, compared in
    full: two different prompts never match, nor two salts. Node ids are never reused, so the
    descendants of an evicted block cannot be reached through the block that replaces it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size  # in tokens
        self._last_node = 0
        self._nodes: dict[_Key, tuple[int, int]] = {}  # node, block
        self._keys: dict[int, _Key] = {}  # by block

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the blocks of a salt's longest cached prefix of whole blocks, in order."""
        node: int | str = salt
        blocks = []
        for chunk in self._chunks(tokens):
            found = self._nodes.get((node, chunk))
            if found is None:
                break
            node, block = found
            blocks.append(block)
        return blocks

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> list[int]:
        """Index blocks by their tokens.

        Args:
            tokens: from position 0; a last chunk that fills no block is left out.
            blocks: hold the keys and values of these tokens.
            salt: only a lookup with the same one finds them.

        Returns:
            the newly indexed blocks; a block is skipped if another one holds the same prefix.
        """
        node: int | str = salt
        inserted = []
        for chunk, block in zip(self._chunks(tokens), blocks, strict=False):
            key = (node, chunk)
            if key not in self._nodes:
                self.remove(block)  # it may be indexed below a node that was removed
                self._last_node += 1
                self._nodes[key] = self._last_node, block
                self._keys[block] = key
                inserted.append(block)
            node, _ = self._nodes[key]
        return inserted

    def remove(self, block: int) -> None:
        """Remove a block if it is indexed."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._nodes[key]

    def clear(self) -> None:
        """Remove all blocks."""
        self._nodes.clear()
        self._keys.clear()

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            yield tuple(tokens[start : start + self._block_size])


BLOCK_SIZE = 16
NUM_PADDING_BLOCKS = 2  # in addition to those of requests: the first and the last block
_MAX_PADDING = 64  # tokens by which the padding of a short row may exceed the capacity, exclusive
_CACHE_LINE = 64  # bytes


def position_bytes(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Return the bytes of one position's keys and values over all layers.

    Args:
        shapes: per layer (key/value heads, head dimension).
        dtype: of keys and values.
    """
    return sum(2 * heads * dim for heads, dim in shapes) * dtype.itemsize


class KVCache:
    """Paged keys and values of up to ``rows`` requests.

    Full blocks that are cached (:meth:`cache_prefix`) are shared by rows that start with the same
    tokens (:meth:`allocate_with_prefix`), and outlive their row until the memory is needed.

    Blocks 0 and ``allocator.size + 1`` take what padding writes. Columns of ``block_tables``
    without a block point to block 0, as do those beyond the capacity; row ``rows``, which pads
    batches, has the last block. They are apart so that a NaN written by a padding row is not read,
    behind a mask, by others.

    Attributes:
        keys: per layer ``[blocks, block_size, heads, head_dim]`` in the model's dtype. The C++
            kernels arrange a block in their own way (``native/attention.h``).
        values: like ``keys``.
        block_tables: int32 ``[rows + 1, columns]`` on their device; column c holds the block of
            the row's positions from ``c * block_size`` on.
        prompt_lengths: per row, the padding row included, its prompt's length in tokens.
        max_shared_prompt: rows with longer prompts share no blocks, since their keys depend on
            the length of the prompt (``dynamic_rope.py``); None for no limit.
        hidden: ``[blocks, block_size, H]``, what the model's head read at every position, for
            drafts and records; None if it is not kept.
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
        hidden_size: int = 0,
    ) -> None:
        """Allocate the memory; on CPUs a page is committed only when it is written.

        Args:
            shapes: per layer (key/value heads, head dimension).
            rows: maximum number of requests.
            capacity: maximum positions per row.
            dtype: of keys and values.
            device: of keys and values.
            positions: over all rows, rounded up to whole blocks; None is ``rows * capacity``.
                Padding blocks come on top.
            block_size: positions per block, a multiple of 16.
            hidden_size: H, of the hidden states to keep; 0 keeps none.

        Raises:
            ValueError: a single row would not fit.
        """
        self.capacity, self.dtype, self.block_size = capacity, dtype, block_size
        self.rows = rows
        self.prompt_lengths = [0] * (rows + 1)
        self.max_shared_prompt: int | None = None
        columns = -(-capacity // block_size)
        blocks = rows * columns if positions is None else -(-positions // block_size)
        if blocks < columns:
            raise ValueError(
                f"{blocks} blocks of {block_size} positions hold less than one request, which "
                f"may have {capacity} positions"
            )
        self.allocator = BlockAllocator(blocks)
        self._prefixes = PrefixCache(block_size)
        self._blocks: list[list[int]] = [[] for _ in range(rows)]
        # Zeros, since a masked position must not hold a NaN (0 x NaN is NaN).
        self.keys, self.values = (
            [
                _zeros((blocks + NUM_PADDING_BLOCKS, block_size, *shape), dtype, device)
                for shape in shapes
            ]
            for _ in range(2)
        )
        self.hidden: Tensor | None = None
        if hidden_size:
            states = (blocks + NUM_PADDING_BLOCKS, block_size, hidden_size)
            self.hidden = _zeros(states, dtype, device)
        host = torch.zeros(rows + 1, columns - (-_MAX_PADDING // block_size), dtype=torch.int32)
        host[rows] = blocks + 1
        self.block_tables = host.to(device)
        self._host, self._host_tables = host.numpy(), host
        self._stale = False

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.block_tables.device

    @property
    def attention_dtype(self) -> torch.dtype:
        """Dtype of torch's attention; on CPUs float32 is several times faster than half."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def blocks(self, row: int) -> tuple[int, ...]:
        """Return the blocks of a row, shared ones included."""
        return tuple(self._blocks[row])

    def is_allocated(self, row: int, length: int) -> bool:
        """Return whether a row has blocks for its first ``length`` positions, capacity at most."""
        return self._columns(length) <= len(self._blocks[row])

    def allocate(self, row: int, length: int) -> bool:
        """Extend a row's blocks to its first ``length`` positions, capacity at most.

        Returns:
            False if too few blocks are available; nothing has changed then.
        """
        missing = self._columns(length) - len(self._blocks[row])
        if missing > self.allocator.num_available:
            return False
        if missing > 0:
            self._allocate(row, missing)
        return True

    def allocate_with_prefix(
        self,
        row: int,
        tokens: Sequence[int],
        length: int,
        watermark: int = 0,
        prompt: int = 0,
        salt: str = "",
    ) -> int | None:
        """Allocate the blocks of an empty row, reusing cached ones that hold its first tokens.

        Args:
            row: has no blocks.
            tokens: looked up in the prefix cache.
            length: positions to allocate.
            watermark: blocks that must stay available.
            prompt: length of the row's prompt in tokens.
            salt: only blocks that were cached with the same one are reused.

        Returns:
            number of positions that are computed already; None if too few blocks are available,
            and nothing has changed then.
        """
        assert not self._blocks[row]
        self.prompt_lengths[row] = prompt
        cached = self._match(row, tokens, salt)
        missing = max(0, self._columns(length) - len(cached))
        idle = sum(not self.allocator.ref_count(block) for block in cached)
        if missing > self.allocator.num_available - idle - watermark:
            return None
        self.allocator.touch(cached)
        self._append(row, cached)
        if missing:
            self._allocate(row, missing)
        return len(cached) * self.block_size

    def take_prefix(
        self, row: int, tokens: Sequence[int], num_computed: int, salt: str = ""
    ) -> int:
        """Replace a row's blocks by cached ones that hold more of its first tokens.

        Args:
            row: with blocks for all of the tokens.
            tokens: looked up in the prefix cache.
            num_computed: positions that the row has computed.
            salt: see :meth:`allocate_with_prefix`.

        Returns:
            number of positions that are computed now.
        """
        cached = self._match(row, tokens, salt)
        if len(cached) * self.block_size <= num_computed:
            return num_computed
        self.allocator.touch(cached)  # before own ones are freed: some are the same
        own, self._blocks[row] = self._blocks[row], []
        self.allocator.free(own[: len(cached)])
        self._append(row, [*cached, *own[len(cached) :]])
        return len(cached) * self.block_size

    def cache_prefix(self, row: int, tokens: Sequence[int], salt: str = "") -> None:
        """Cache a row's full blocks for later rows, up to the first that is not finite.

        Args:
            row: its positions 0..len(tokens)-1 are computed and final.
            tokens: at these positions.
            salt: of the later rows.
        """
        if not self.is_shareable(row):
            return
        full = self._blocks[row][: len(tokens) // self.block_size]
        uncached = [block for block in full if not self.allocator.is_cached(block)]
        bad = set(self._not_finite(uncached))
        end = next((i for i, block in enumerate(full) if block in bad), len(full))
        shared = self._prefixes.insert(tokens[: end * self.block_size], full[:end], salt)
        self.allocator.cache(shared)

    def free(self, row: int) -> None:
        """Free a row's blocks; cached ones become idle."""
        # In reverse, so that the start of a prompt, which most requests share, is evicted last.
        self.allocator.free(reversed(self._blocks[row]))
        self._blocks[row] = []
        self._host[row] = 0
        self._stale = True

    def zero(self, row: int) -> None:
        """Zero and uncache the blocks that only this row uses, and zero the padding blocks.

        Call it before :meth:`free` if the row's values are not finite, so that no later row reads
        them. Blocks shared with other rows were checked when they were cached.
        """
        own = [block for block in self._blocks[row] if self.allocator.ref_count(block) == 1]
        self.allocator.uncache(own)
        for block in own:
            self._prefixes.remove(block)
        at = torch.tensor([0, self.allocator.size + 1, *own], device=self.device)
        for part in self._parts():
            part[at] = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks; those that rows use are free once the rows are."""
        self._prefixes.clear()
        self.allocator.reset_cache()

    def sync(self) -> None:
        """Update ``block_tables`` on another device; call it before a forward, never within one.

        The copy is in place, so that captured CUDA graphs see it.
        """
        if self._stale and self.block_tables is not self._host_tables:
            self.block_tables.copy_(self._host_tables, non_blocking=True)
        self._stale = False

    def read_hidden(self, rows: Sequence[int], positions: Tensor) -> Tensor:
        """Return the hidden states ``[B, T, H]`` of computed positions, zeros before the first.

        Args:
            rows: B rows.
            positions: int64 ``[B, T]``; -1 is before the first.
        """
        assert self.hidden is not None
        self.sync()
        index = device_tensor(rows, self.device)
        kernels = kernels_for(self.device, self.hidden.dtype)
        if kernels is not None:
            return kernels.read_states(self.hidden, self.block_tables, index, positions)
        at = positions.clamp(min=0)
        table = self.block_tables[index].long()
        blocks = table.gather(1, (at // self.block_size).clamp(max=table.shape[1] - 1))
        states = self.hidden[blocks, at % self.block_size]
        return states.masked_fill(positions[..., None] < 0, 0.0)

    def _not_finite(self, blocks: Sequence[int]) -> list[int]:
        """Return the blocks that hold a NaN or infinity."""
        if not blocks:
            return []
        at = torch.tensor(blocks, device=self.device)
        kernels = kernels_for(self.device, self.dtype)
        if kernels is not None:
            finite = kernels.have_finite_blocks([*self._parts()], at)
        else:
            total = torch.zeros(len(blocks), device=self.device)
            for part in self._parts():
                total += part[at].mul_(0).flatten(1).sum(dim=1, dtype=torch.float32)
            finite = total == 0  # 0 times NaN or infinity is NaN
        return [b for b, one in zip(blocks, finite.tolist(), strict=True) if not one]

    def _parts(self) -> Iterator[Tensor]:
        yield from self.keys
        yield from self.values
        if self.hidden is not None:
            yield self.hidden

    def _match(self, row: int, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the cached blocks that a row may have in common with others."""
        return self._prefixes.match(tokens, salt) if self.is_shareable(row) else []

    def is_shareable(self, row: int) -> bool:
        """Whether a row may have blocks in common with others."""
        return self.max_shared_prompt is None or self.prompt_lengths[row] <= self.max_shared_prompt

    def _columns(self, length: int) -> int:
        return -(-min(length, self.capacity) // self.block_size)

    def _allocate(self, row: int, count: int) -> None:
        blocks = self.allocator.allocate(count)
        for block in blocks:
            self._prefixes.remove(block)
        self._append(row, blocks)

    def _append(self, row: int, blocks: Sequence[int]) -> None:
        held = self._blocks[row]
        self._host[row, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)
        self._stale = True


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros aligned to cache lines.

    On CPUs numpy's are committed page by page when written; ``torch.zeros`` writes them all.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


class RowAllocator:
    """Batch rows of requests; a request keeps its row until it is freed."""

    def __init__(self, rows: int) -> None:
        self.size = rows
        self._rows: dict[Hashable, int] = {}
        self._free = list(range(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._rows

    @property
    def full(self) -> bool:
        """Whether no row is free."""
        return not self._free

    def row(self, request: Hashable) -> int:
        """Return the row of a request; KeyError if it has none."""
        return self._rows[request]

    def allocate(self, request: Hashable) -> int:
        """Give a request the lowest free row.

        Raises:
            RuntimeError: no row is free, or the request has one.
        """
        if self.full:
            raise RuntimeError(f"all {self.size} rows are taken")
        if request in self._rows:
            raise RuntimeError(f"request {request!r} already has a row")
        row = self._rows[request] = heapq.heappop(self._free)
        return row

    def free(self, request: Hashable) -> int:
        """Free and return the row of a request; KeyError if it has none."""
        row = self._rows.pop(request)
        heapq.heappush(self._free, row)
        return row
