"""CUDA graphs of decoding steps: one launch instead of hundreds per forward.

A small model's step takes less time on a GPU than Python needs to launch its kernels. A graph has
one shape; inputs are copied into its static tensors, and results are copied out before the next
replay overwrites them. Rows and tokens are padded to a few sizes, and rows of several experts are
computed by every expert of the stack, so that few graphs serve all batches. Prompts have too many
shapes and run eagerly.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from paceline.actors.engine.attention import StepContext
from paceline.actors.engine.expert_layout import ExpertLayout, dense_layout
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.top_tokens import most_probable_into

logger = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Work = Callable[..., Tensors]

_MAX_GRAPHS = 256
_RESULT_SHARE = 0.1  # of what is free at the first capture, for the results of a decoder's graphs
_MIN_COLUMNS, _COLUMNS = 4, 16
_DRAFT_TOKENS = 2  # per row of a draft's forwards behind its prompt
# Weights of a stack that may all be read although few experts are needed: some 0.1 ms.
_MAX_DENSE_BYTES = 1 << 28


class Capture(Protocol):
    """Captures what a function does to static tensors."""

    @property
    def max_result_bytes(self) -> int:
        """Of all captured functions together."""
        ...

    def __call__(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Return a function that replays ``run``, and the tensors that then hold the results.

        The tensors that ``run`` reads must outlive the function.
        """
        ...

    def reset(self) -> None:
        """Release the shared memory, after all captured functions are gone."""
        ...


class CudaCapture:
    """CUDA graphs with a shared memory pool; only one of them runs at a time.

    It has its own streams, since torch keeps a library's workspace per stream, and releases it for
    all graphs that were captured on the stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @cached_property
    def max_result_bytes(self) -> int:
        """See Capture; asked for first when caches and drafts have their memory."""
        free, _ = torch.cuda.mem_get_info()
        return int(free * _RESULT_SHARE)

    def reset(self) -> None:
        """Start a new pool; torch has released the old one with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See Capture; also runs the function on the warm-up stream."""
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            self._warm_up.wait_stream(before)
            with torch.cuda.stream(self._warm_up):
                run()
            before.wait_stream(self._warm_up)
            # thread_local: other threads of the process may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        finally:
            torch.cuda.set_stream(before)  # a failed capture does not restore it
        return graph.replay, result


def bucket_columns(needed: int, available: int) -> int:
    """Round the block table columns of a graph up to 4, 16, 32, 64 ...

    Args:
        needed: columns of the batch, at least 1.
        available: columns of the table.
    """
    least = _MIN_COLUMNS if needed <= _MIN_COLUMNS else _COLUMNS
    return min(max(least, 1 << (needed - 1).bit_length()), available)


class _Graph:
    """A captured function with static inputs and results of one shape."""

    def __init__(self, capture: Capture, work: Work, inputs: Tensors) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._work = work  # keeps what else the graph reads alive: a layout's indices
        self._replay, self._results = capture(lambda: work(*self._inputs))
        self.nbytes = sum(result.nbytes for result in self._results)

    def run(self, inputs: Tensors) -> Tensors:
        """Replay with other inputs of the same shape and return copies of the results."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._replay()
        return tuple(result.clone() for result in self._results)


class _GraphCache:
    """Graphs of functions of tensors, captured the second time that a shape occurs."""

    def __init__(self, capture: Capture) -> None:
        self._capture: Capture | None = capture
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs, which read the memory of earlier weights."""
        self._graphs.clear()
        self._seen.clear()
        if self._capture is not None:
            self._capture.reset()

    def run(self, key: tuple[object, ...], work: Work, *inputs: Tensor) -> Tensors:
        """Return ``work(*inputs)``; equal keys imply equal work and shapes."""
        graph = self._graphs.get(key)
        if graph is None and key not in self._seen:  # this shape may not come again
            self._seen[key] = None
            if len(self._seen) > 4 * _MAX_GRAPHS:
                self._seen.popitem(last=False)
            return work(*inputs)
        if graph is None:
            graph = self._try_capture(work, inputs)
            if graph is None:
                return work(*inputs)
            self._graphs[key] = graph
        return graph.run(inputs)

    def _try_capture(self, work: Work, inputs: Tensors) -> _Graph | None:
        if self._capture is None:
            return None
        nbytes = sum(graph.nbytes for graph in self._graphs.values())
        if len(self._graphs) >= _MAX_GRAPHS or nbytes > self._capture.max_result_bytes:
            self.clear()  # all, as torch may release with one graph what others still need
        try:
            return _Graph(self._capture, work, inputs)
        except RuntimeError:
            logger.exception("CUDA graphs are off: a capture failed")
            self.clear()  # their memory first: it may be what was missing
            self._capture = None
            return None


class GraphedDecoder:
    """A fused decoder whose short forwards run as CUDA graphs.

    Attributes:
        eager: the fused decoder.
    """

    def __init__(self, decoder: FusedDecoder, capture: Capture, max_tokens: int) -> None:
        """Wrap a decoder.

        Args:
            decoder: ``refresh`` must keep its weights in the same memory.
            capture: captures graphs.
            max_tokens: per row; longer forwards run eagerly.
        """
        self.eager = decoder
        self._max_tokens = max_tokens
        self._widths = sorted({1, min(2, max_tokens), (max_tokens + 1) // 2, max_tokens})
        self._graphs = _GraphCache(capture)
        self._growing = False
        self._dense = decoder.nbytes() <= _MAX_DENSE_BYTES

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def grow(self, models: Sequence[PreTrainedModel]) -> Iterator[None]:
        """See Decoder."""
        self._growing = True
        self._graphs.clear()
        try:
            yield from self.eager.grow(models)
        finally:
            self._growing, self._dense = False, self.eager.nbytes() <= _MAX_DENSE_BYTES

    def refresh(self, expert: int | None = None) -> None:
        """See Decoder."""
        self.eager.refresh(expert)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        if not self._replays(token_ids, layout, keep):
            return self.eager.with_hidden(token_ids, step, layout, keep)

        def compute(ids: Tensor, context: StepContext, own: ExpertLayout) -> Tensors:
            return self.eager.with_hidden(ids, context, own, keep)

        logits, hidden = self._run(compute, "hidden", token_ids, step, layout, keep)
        return logits, hidden

    def __call__(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """See Decoder."""
        if not self._replays(token_ids, layout, keep):
            return self.eager(token_ids, step, layout, keep)

        def compute(ids: Tensor, context: StepContext, own: ExpertLayout) -> Tensors:
            return (self.eager(ids, context, own, keep),)

        return self._run(compute, "forward", token_ids, step, layout, keep)[0]

    def _replays(self, token_ids: Tensor, layout: ExpertLayout, keep: int) -> bool:
        max_tokens = _DRAFT_TOKENS if keep else self._max_tokens
        return token_ids.shape[1] <= max_tokens and self._is_capturable(layout)

    def _run(
        self,
        compute: Callable[[Tensor, StepContext, ExpertLayout], Tensors],
        kind: str,
        token_ids: Tensor,
        step: StepContext,
        layout: ExpertLayout,
        keep: int,
    ) -> Tensors:
        """Run a forward of a padded shape as a graph; results have the batch's own shape."""
        batch, tokens = token_ids.shape
        width = tokens if keep else next(n for n in self._widths if n >= tokens)
        rows = _pad_rows(batch, step)
        columns = _columns(step, width - tokens)
        padded, key = self._pad_layout(layout, rows)
        kv = step.kv

        def work(ids: Tensor, rows: Tensor, positions: Tensor, result_index: Tensor) -> Tensors:
            context = _context(kv, rows, positions, columns)
            return compute(ids, context, padded.with_result_index(result_index))

        inputs = _pad_inputs(token_ids, step, rows, width)
        shape = (kind, rows, width, columns, keep, key)
        found = self._graphs.run(shape, work, *inputs, padded.result_index)
        return tuple(one[:batch] if keep else one[:batch, :tokens] for one in found)

    def rollout(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, steps: int
    ) -> tuple[Tensor, Tensor] | None:
        """Draft the most probable tokens, all steps in one replay; None without graphs.

        Args:
            token_ids: int64 ``[B, 2]``, the last tokens of every row.
            step: their positions; its columns include those of the drafted tokens.
            layout: experts of the rows.
            steps: k.

        Returns:
            tokens int64 and their probabilities float32, ``[B, k]`` each.
        """
        if not self._is_capturable(layout):
            return None
        batch, rows = len(token_ids), _pad_rows(len(token_ids), step)
        columns = _columns(step, 0)
        padded, key = self._pad_layout(layout, rows)
        kv = step.kv

        def work(ids: Tensor, at: Tensor, positions: Tensor, result_index: Tensor) -> Tensors:
            chosen = torch.empty(steps, rows, 1, dtype=torch.int64, device=ids.device)
            probs = torch.empty(steps, rows, 1, device=ids.device)
            own = padded.with_result_index(result_index)
            for i in range(steps):
                logits = self.eager(ids, _context(kv, at, positions, columns), own, 1)
                most_probable_into(logits, chosen[i], probs[i])
                ids, positions = chosen[i], positions[:, -1:] + 1
            return chosen.squeeze(-1).T.contiguous(), probs.squeeze(-1).T.contiguous()

        inputs = _pad_inputs(token_ids, step, rows, token_ids.shape[1])
        shape = ("rollout", rows, steps, columns, key)
        chosen, probs = self._graphs.run(shape, work, *inputs, padded.result_index)
        return chosen[:batch], probs[:batch]

    def _is_capturable(self, layout: ExpertLayout) -> bool:
        return not self._growing and (layout.single is not None or self._dense)

    def _pad_layout(self, layout: ExpertLayout, rows: int) -> tuple[ExpertLayout, object]:
        """Return a layout of so many rows, and a key of all layouts of its shape."""
        # A single row costs less with its own expert; batches share the graphs of all mixtures.
        own = rows == 1 or self.eager.count == 1 or not self._dense
        if layout.single is not None and own:
            return layout.resized(rows), layout.single
        padded = (*layout.expert_of_row, *[0] * (rows - len(layout.expert_of_row)))
        return dense_layout(padded, self.eager.count, layout.device), "all"


def _context(kv: KVCache, rows: Tensor, positions: Tensor, columns: int) -> StepContext:
    """Make a new context for every run and step, since it caches what it derives from tensors."""
    return StepContext(kv, rows, positions.clamp(0, kv.capacity - 1), columns, positions)


def _pad_rows(batch: int, step: StepContext) -> int:
    return min(1 << (batch - 1).bit_length(), step.kv.rows)


def _columns(step: StepContext, num_padding: int) -> int:
    """Return the table columns of a graph whose rows have padding tokens behind."""
    return bucket_columns(
        step.columns + -(-num_padding // step.kv.block_size), step.kv.block_tables.shape[1]
    )


def _pad_inputs(token_ids: Tensor, step: StepContext, rows: int, width: int) -> Tensors:
    """Return tokens, rows and positions of a larger batch; added rows are the padding row."""
    batch, tokens = token_ids.shape
    positions, at = step.unclamped, step.rows
    if width > tokens:
        beyond = torch.arange(1, width - tokens + 1, device=positions.device)
        positions = torch.cat([positions, positions[:, -1:] + beyond], dim=1)
    if rows > batch:
        at = functional.pad(at, (0, rows - batch), value=step.kv.rows)
        positions = functional.pad(positions, (0, 0, 0, rows - batch))
    if (rows, width) != (batch, tokens):
        token_ids = functional.pad(token_ids, (0, width - tokens, 0, rows - batch))
    return token_ids, at, positions
