"""Decode steps replayed from CUDA graphs: one launch instead of hundreds per forward.

A small model's step takes less time on a GPU than Python needs to launch its kernels. A recording
holds one shape; its inputs are copied into fixed tensors, its results copied out, because the next
replay writes over them. So that few shapes serve all batches, rows and tokens are padded to the
next of a few sizes, and rows of several experts are computed by every expert of the stack. Prompts
come in too many shapes and go without.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.attention import StepContext
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.grid import Grid, whole_grid
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.top_tokens import most_probable_into

logger = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Work = Callable[..., Tensors]

_MOST_RECORDINGS = 256
_MOST_RESULT_BYTES = 1 << 28  # which recordings hold, beside what they compute with
_FEW_COLUMNS, _COLUMNS = 4, 16
_DRAFT_TOKENS = 2  # of a draft's forwards behind its prompt
# Weights of a stack that may all be read for the sake of a few of its experts: some 0.1 ms.
_WHOLE_BYTES = 1 << 28


class Capture(Protocol):
    """Records what a function does to fixed tensors."""

    def __call__(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """What does it again, and the tensors that then hold the results.

        Tensors that ``run`` reads must be kept as long as that is called.
        """
        ...

    def forget(self) -> None:
        """All that was recorded has been given up."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: only one of them runs at a time.

    The streams are its own: torch keeps what a library needs beside a graph by stream, and gives
    it up for all that were recorded on the stream.
    """

    def __init__(self) -> None:
        """Make pool and streams."""
        self._pool = torch.cuda.graph_pool_handle()
        self._warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Take a new pool: no graph of the old one is left, and torch has done with it."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See Capture; runs the function itself too, on a stream of its own, to warm up."""
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            self._warm_up.wait_stream(before)
            with torch.cuda.stream(self._warm_up):
                run()
            before.wait_stream(self._warm_up)
            # Other threads of the process may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        finally:
            torch.cuda.set_stream(before)  # which a capture that fails does not give back
        return graph.replay, result


def columns_of(wanted: int, most: int) -> int:
    """Table columns that a recording reads: 4, 16, 32, 64 ... so that few serve all.

    Args:
        wanted: columns that the batch needs, at least 1.
        most: columns that there are.
    """
    few = _FEW_COLUMNS if wanted <= _FEW_COLUMNS else _COLUMNS
    return min(max(few, 1 << (wanted - 1).bit_length()), most)


class _Recording:
    """One recorded shape."""

    def __init__(self, capture: Capture, work: Work, inputs: Tensors) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._work = work  # and with it what else the recording reads: a layout's indices
        self._replay, self._results = capture(lambda: work(*self._inputs))
        self.nbytes = sum(result.nbytes for result in self._results)

    def run(self, inputs: Tensors) -> Tensors:
        """The results of other inputs of the same shape."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._replay()
        return tuple(result.clone() for result in self._results)


class _Recordings:
    """Functions of tensors alone, recorded the second time that their shape comes."""

    def __init__(self, capture: Capture) -> None:
        self._capture: Capture | None = capture
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._kept: dict[tuple[object, ...], _Recording] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Record all anew: what was recorded reads weights where they lay before."""
        self._kept.clear()
        self._seen.clear()
        if self._capture is not None:
            self._capture.forget()

    def run(self, key: tuple[object, ...], work: Work, *inputs: Tensor) -> Tensors:
        """What ``work`` makes of the inputs; equal keys stand for the same work and shapes."""
        recording = self._kept.get(key)
        if recording is None and key not in self._seen:  # may well be the only time
            self._seen[key] = None
            if len(self._seen) > 4 * _MOST_RECORDINGS:
                self._seen.popitem(last=False)
            return work(*inputs)
        if recording is None:
            recording = self._record(work, inputs)
            if recording is None:
                return work(*inputs)
            self._kept[key] = recording
        return recording.run(inputs)

    def _record(self, work: Work, inputs: Tensors) -> _Recording | None:
        if self._capture is None:
            return None
        held = sum(recording.nbytes for recording in self._kept.values())
        if len(self._kept) >= _MOST_RECORDINGS or held > _MOST_RESULT_BYTES:
            self.forget()  # all: torch may give up what others still need with a single one
        try:
            return _Recording(self._capture, work, inputs)
        except RuntimeError:
            logger.exception("no CUDA graphs any more: one could not be recorded")
            self.forget()  # first of all their memory, which may be what was lacking
            self._capture = None
            return None


class GraphedDecoder:
    """A fused decoder whose short forwards are recorded the second time that their shape comes."""

    def __init__(self, decoder: FusedDecoder, capture: Capture, most_tokens: int) -> None:
        """Wrap.

        Args:
            decoder: what ``refresh`` makes of its weights must be in the same memory.
            capture: how work is recorded.
            most_tokens: per row; forwards of more run as they are.
        """
        self.plain = decoder
        self._most_tokens = most_tokens
        self._widths = sorted({1, min(2, most_tokens), (most_tokens + 1) // 2, most_tokens})
        self._recordings = _Recordings(capture)
        self._growing = False
        self._whole = decoder.nbytes() <= _WHOLE_BYTES

    @property
    def recorded(self) -> int:
        """Shapes that are replayed now."""
        return len(self._recordings)

    def grow(self, models: Sequence[Any]) -> Iterator[None]:
        """See Decoder."""
        self._growing = True
        self._recordings.forget()
        try:
            yield from self.plain.grow(models)
        finally:
            self._growing, self._whole = False, self.plain.nbytes() <= _WHOLE_BYTES

    def refresh(self, expert: int | None = None) -> None:
        """See Decoder."""
        self.plain.refresh(expert)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder; never from a recording."""
        return self.plain.with_hidden(token_ids, step, grid, keep)

    def __call__(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """See Decoder."""
        batch, tokens = token_ids.shape
        most = _DRAFT_TOKENS if keep else self._most_tokens
        if tokens > most or not self._serves(grid):
            return self.plain(token_ids, step, grid, keep)
        width = tokens if keep else next(n for n in self._widths if n >= tokens)
        rows = _rows(batch, step)
        columns = _columns(step, width - tokens)
        own, key = self._layout(grid, rows)
        kv = step.kv

        def work(ids: Tensor, at: Tensor, asked: Tensor, place: Tensor) -> Tensors:
            context = _context(kv, at, asked, columns)
            return (self.plain(ids, context, own.placed(place), keep),)

        inputs = _padded(token_ids, step, rows, width)
        shape = ("forward", rows, width, columns, keep, key)
        logits = self._recordings.run(shape, work, *inputs, own.place)[0]
        return logits[:batch] if keep else logits[:batch, :tokens]

    def rollout(
        self, token_ids: Tensor, step: StepContext, grid: Grid, steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """The most probable continuation, all steps in one replay; None where that cannot be.

        Args:
            token_ids: int64 ``[B, 2]``, the last tokens of every row.
            step: their positions; its columns hold those that are drafted too.
            grid: which expert runs which row.
            steps: k.

        Returns:
            tokens int64 and their probabilities float32, ``[B, k]`` each.
        """
        if not self._serves(grid):
            return None
        batch, rows = len(token_ids), _rows(len(token_ids), step)
        columns = _columns(step, 0)
        own, key = self._layout(grid, rows)
        kv = step.kv

        def work(ids: Tensor, at: Tensor, asked: Tensor, place: Tensor) -> Tensors:
            chosen = torch.empty(steps, rows, 1, dtype=torch.int64, device=ids.device)
            probs = torch.empty(steps, rows, 1, device=ids.device)
            layout = own.placed(place)
            for i in range(steps):
                logits = self.plain(ids, _context(kv, at, asked, columns), layout, 1)
                most_probable_into(logits, chosen[i], probs[i])
                ids, asked = chosen[i], asked[:, -1:] + 1
            return chosen.squeeze(-1).T.contiguous(), probs.squeeze(-1).T.contiguous()

        inputs = _padded(token_ids, step, rows, token_ids.shape[1])
        shape = ("rollout", rows, steps, columns, key)
        chosen, probs = self._recordings.run(shape, work, *inputs, own.place)
        return chosen[:batch], probs[:batch]

    def _serves(self, grid: Grid) -> bool:
        return not self._growing and (grid.single is not None or self._whole)

    def _layout(self, grid: Grid, rows: int) -> tuple[Grid, object]:
        """A layout of so many rows, and what stands for all that have its shape."""
        # By itself an expert costs less; in batches it shares the recordings of all mixtures.
        alone = rows == 1 or self.plain.count == 1 or not self._whole
        if grid.single is not None and alone:
            return grid.of_rows(rows), grid.single
        padded = (*grid.expert_of_row, *[0] * (rows - len(grid.expert_of_row)))
        return whole_grid(padded, self.plain.count, grid.device), "all"


def _context(kv: KVCache, rows: Tensor, asked: Tensor, columns: int) -> StepContext:
    """One for every run and step: a context caches what it has derived from its tensors."""
    return StepContext(kv, rows, asked.clamp(0, kv.capacity - 1), columns, asked)


def _rows(batch: int, step: StepContext) -> int:
    return min(1 << (batch - 1).bit_length(), step.kv.rows)


def _columns(step: StepContext, further: int) -> int:
    """Columns of a recording whose rows go on for some positions more."""
    return columns_of(
        step.columns + -(-further // step.kv.block_size), step.kv.block_tables.shape[1]
    )


def _padded(token_ids: Tensor, step: StepContext, rows: int, width: int) -> Tensors:
    """Tokens, rows and positions of a larger batch; further rows are nobody's."""
    batch, tokens = token_ids.shape
    asked, at = step.asked, step.rows
    if width > tokens:
        beyond = torch.arange(1, width - tokens + 1, device=asked.device)
        asked = torch.cat([asked, asked[:, -1:] + beyond], dim=1)
    if rows > batch:
        at = functional.pad(at, (0, rows - batch), value=step.kv.rows)
        asked = functional.pad(asked, (0, 0, 0, rows - batch))
    if (rows, width) != (batch, tokens):
        token_ids = functional.pad(token_ids, (0, width - tokens, 0, rows - batch))
    return token_ids, at, asked
