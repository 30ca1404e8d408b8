"""Fused and stacked linear layers of several models of one architecture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.expert_layout import ExpertLayout

_ROWS = (2, 3, 5, 9, 16)
_TRIALS = 5
_MIN_GAIN = 0.9  # of the packed product's time, below which torch's is used
_max_torch_rows: dict[tuple[int, ...], int] = {}


def max_torch_rows(
    weight: Tensor,
    packed: Callable[[Tensor], Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the most rows for which torch's own product is faster than the packed one, or 0.

    Measured once per process for each size and number of threads.

    Args:
        weight: ``[out, in]``.
        packed: ``[N, in]`` to ``[N, out]`` with the packed weight.
        clock: seconds.
    """
    key = (*weight.shape, torch.get_num_threads())
    if key not in _max_torch_rows:
        _max_torch_rows[key] = _measure(weight, packed, clock)
    return _max_torch_rows[key]


def _measure(weight: Tensor, packed: Callable[[Tensor], Tensor], clock: Callable[[], float]) -> int:
    max_rows = 0
    for rows in _ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        seconds = [float("inf"), float("inf")]
        for _ in range(_TRIALS):  # alternating, so that other load affects both
            for i, product in enumerate((lambda y: functional.linear(y, weight), packed)):
                started_at = clock()
                product(x)
                seconds[i] = min(seconds[i], clock() - started_at)
        if seconds[0] >= _MIN_GAIN * seconds[1]:
            break
        max_rows = rows
    return max_rows


_SINGLE_ROW_TRIALS = 8
# Above the first number of rows, sizes are multiples of the second.
_STEPS = ((256, 32), (128, 16), (64, 8))


def padded_size(rows: int) -> int:
    """Round a number of rows up to a size that products on CPUs are computed at.

    oneDNN generates code for every new number of rows, which takes a millisecond, longer than the
    product itself, and caches some hundred sizes. Prompts of any length would have it regenerate
    all the time. Decoding batches are not padded, since rows are expensive there.
    """
    for above, step in _STEPS:
        if rows > above:
            return -(-rows // step) * step
    return rows


class StackedLinear:
    """The same linear layer of E experts.

    On CPUs a copy of the weights is kept in oneDNN's layout, as otherwise every call reorders them,
    at two to three times the cost in bfloat16 and up to twice in float32. Its products give a row
    the same bits in every batch, except for a single row, which takes another path in float32 and
    at some sizes in bfloat16. If the bits must not depend on the batch, a single row is padded:
    always in bfloat16, which costs next to nothing, and with ``invariant`` in float32. Without it,
    float32 products of few rows are torch's own if those are faster (:func:`max_torch_rows`).

    Attributes:
        weight: ``[E, out, in]``, not copied.
        bias: ``[E, out]`` or None.
        invariant: see FusedDecoder.
    """

    invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: list[Tensor] | None = None
        self._single_row_differs = False
        self._max_torch_rows = 0

    @property
    def packed(self) -> bool:
        """Whether products are oneDNN's."""
        return self._packed is not None

    def pack(self, expert: int | None = None) -> None:
        """Pack the weights of one expert, or all, after they have changed."""
        if not packable(self.weight):
            return
        if self._packed is None or expert is None:
            self._packed = [_pack(weight) for weight in self.weight]
            self._single_row_differs = self._compare_single_row()
            if self.weight.dtype is torch.float32 and not self.invariant:
                self._max_torch_rows = max_torch_rows(
                    self.weight[0], lambda x: self._packed_product(x, 0, None)
                )
        else:
            self._packed[expert] = _pack(self.weight[expert])

    def copy_packed(self, other: StackedLinear, count: int) -> None:
        """Take over the packed weights of the first ``count`` experts, and pack the others."""
        self.invariant, self._single_row_differs = other.invariant, other._single_row_differs
        self._max_torch_rows = other._max_torch_rows
        if other._packed is not None:
            new = [_pack(weight) for weight in self.weight[count:]]
            self._packed = [*other._packed[:count], *new]

    def __call__(self, x: Tensor, layout: ExpertLayout) -> Tensor:
        """``[E', N, in]`` to ``[E', N, out]`` for the layout's E' experts."""
        if layout.single is not None:
            return self._apply(x, layout.single)
        if layout.as_slice is not None and self._packed is None:
            product = torch.bmm(x, self.weight[layout.as_slice].transpose(1, 2))
            return product if self.bias is None else product + self.bias[layout.as_slice, None]
        return torch.stack([self._apply(x[i], e) for i, e in enumerate(layout.experts)])

    def _apply(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        rows = x.numel() // x.shape[-1]
        single = self._single_row_differs and rows == 1
        half = x.dtype is not torch.float32
        faster = rows <= self._max_torch_rows or (single and not (half or self.invariant))
        if self._packed is None or faster:
            return functional.linear(x, self.weight[expert], bias)
        if single:
            return self._packed_product(x.expand(*x.shape[:-2], 2, -1), expert, bias)[..., :1, :]
        return self._packed_product(x, expert, bias)

    def _compare_single_row(self) -> bool:
        """Return whether a single row's product differs in bits from that within a batch."""
        weight = self.weight[0]
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(_SINGLE_ROW_TRIALS, weight.shape[1], generator=generator).to(
            weight.dtype
        )
        batch = self._packed_product(rows, 0, None)
        single = torch.cat([self._packed_product(row[None], 0, None) for row in rows])
        return not torch.equal(single, batch)

    def _packed_product(self, x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        assert self._packed is not None
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed[expert], bias, "none", [], ""
        )
        return product


def fuse(groups: Sequence[Sequence[torch.nn.Linear]]) -> StackedLinear:
    """Fuse linear layers that share their input, for every expert.

    Args:
        groups: modules of each expert; their parameters become views into the fused weights, so
            that copying into a module changes them too, once packed.
    """
    sizes = [linear.weight.shape[0] for linear in groups[0]]
    first = groups[0][0].weight
    weight = first.new_empty(len(groups), sum(sizes), first.shape[1])
    has_bias = groups[0][0].bias is not None
    bias = first.new_empty(len(groups), sum(sizes)) if has_bias else None
    for e, group in enumerate(groups):
        for linear, part in zip(group, torch.split(weight[e], sizes), strict=True):
            move_parameter(linear.weight, part)
        if bias is not None:
            for linear, part in zip(group, torch.split(bias[e], sizes), strict=True):
                move_parameter(linear.bias, part)
    return StackedLinear(weight, bias)


def move_parameter(parameter: Tensor, storage: Tensor) -> None:
    """Copy a parameter into shared storage and make it a view of that."""
    storage.copy_(parameter.data)
    parameter.data = storage


def stack(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Stack E parameters of one shape into ``[E, ...]``, of which they become views."""
    storage = parameters[0].data.new_empty(len(parameters), *parameters[0].shape)
    for parameter, part in zip(parameters, storage, strict=True):
        move_parameter(parameter, part)
    return storage


@contextmanager
def restore_on_error(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the storage of the modules' parameters if the body fails.

    If memory runs out, some parameters would be views of storage that is not used, and weights
    loaded later would be lost.
    """
    before = [(p, p.data) for module in modules for p in module.parameters()]
    try:
        yield
    except BaseException:
        for parameter, storage in before:
            parameter.data = storage
        raise


def packable(weight: Tensor) -> bool:
    """Return whether this CPU has a packed layout for these weights."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed
