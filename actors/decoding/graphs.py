"""Decode steps replayed from CUDA graphs: one launch instead of hundreds per forward.

A small draft's step takes less time on a GPU than Python needs to launch its kernels. A graph
holds one shape (rows, tokens per row, table columns, experts); its inputs are copied into fixed
tensors, its logits copied out, because the next replay writes over them. Prompts come in too many
shapes and go without.

Never run on a GPU: the tests run it with a capture that records nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.actors.decoding.attention import StepContext
from paceline.actors.decoding.decoders import Decoder
from paceline.actors.decoding.grid import Grid

Kept = TypeVar("Kept")

_WARM_UP = 2
_MOST_GRAPHS = 64


class Capture(Protocol):
    """Records what a function does to fixed tensors."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does it again, and the tensor that then holds the result."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        """Make the pool."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture; runs the function itself too, on a stream of its own, to warm up."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph.replay, result


def columns_of(wanted: int, most: int) -> int:
    """Table columns that a graph reads: the next power of two, so that few graphs serve all.

    Args:
        wanted: columns that the batch needs, at least 1.
        most: columns that there are.
    """
    return min(1 << (wanted - 1).bit_length(), most)


class _Graph:
    """One recorded shape."""

    def __init__(
        self,
        decoder: Decoder,
        capture: Capture,
        token_ids: Tensor,
        step: StepContext,
        grid: Grid,
        keep: int,
    ) -> None:
        self._tokens = token_ids.clone()
        self._rows, self._positions = step.rows.clone(), step.positions.clone()
        self._asked = step.asked.clone()
        own = (step.kv, self._rows, self._positions, step.columns, self._asked)
        # A context of its own for every run: it caches what it has derived from its tensors.
        self._replay, self._logits = capture(
            lambda: decoder(self._tokens, StepContext(*own), grid, keep)
        )

    def run(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """The logits of other inputs of the same shape."""
        self._tokens.copy_(token_ids)
        self._rows.copy_(step.rows)
        self._positions.copy_(step.positions)
        self._asked.copy_(step.asked)
        self._replay()
        return self._logits.clone()


class GraphedDecoder:
    """A decoder whose short forwards are recorded the second time that their shape comes."""

    def __init__(self, decoder: Decoder, capture: Capture, most_tokens: int) -> None:
        """Wrap.

        Args:
            decoder: must read weights where they lie; what ``refresh`` makes of them must be in
                the same memory.
            capture: how a forward is recorded.
            most_tokens: per row; forwards of more run as they are.
        """
        self.plain = decoder
        self._capture = capture
        self._most_tokens = most_tokens
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._graphs: OrderedDict[tuple[object, ...], _Graph] = OrderedDict()
        self._growing = False

    def grow(self, models: Sequence[Any]) -> Iterator[None]:
        """See Decoder. Weights move meanwhile: what was recorded reads where they lay before."""
        self._growing = True
        self._graphs.clear()
        self._seen.clear()
        try:
            yield from self.plain.grow(models)
        finally:
            self._growing = False

    def refresh(self, expert: int | None = None) -> None:
        """See Decoder."""
        self.plain.refresh(expert)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder; never from a graph."""
        return self.plain.with_hidden(token_ids, step, grid, keep)

    def __call__(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """See Decoder."""
        # Mixed experts come in too many layouts.
        if token_ids.shape[1] > self._most_tokens or grid.single is None or self._growing:
            return self.plain(token_ids, step, grid, keep)
        columns = columns_of(step.columns, step.kv.tables.shape[1])
        step = StepContext(step.kv, step.rows, step.positions, columns, step.asked)
        key = (*token_ids.shape, columns, keep, grid.single)
        graph = self._graphs.get(key)
        if graph is None and key not in self._seen:  # may well be the only time
            _remember(self._seen, key, None, 4 * _MOST_GRAPHS)
            return self.plain(token_ids, step, grid, keep)
        if graph is None:
            graph = _Graph(self.plain, self._capture, token_ids, step, grid, keep)
        _remember(self._graphs, key, graph, _MOST_GRAPHS)
        return graph.run(token_ids, step)


def _remember(
    store: OrderedDict[tuple[object, ...], Kept], key: tuple[object, ...], item: Kept, most: int
) -> None:
    """Keep an item as the latest used of at most so many."""
    store[key] = item
    store.move_to_end(key)
    if len(store) > most:
        store.popitem(last=False)
