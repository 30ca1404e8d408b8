"""Projections of several models of one architecture, fused and stacked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.grid import Grid

_ROWS = (2, 3, 5, 9, 16)
_TRIALS = 5
_GAIN = 0.9  # of the packed one's time, below which the other is taken
_found: dict[tuple[int, ...], int] = {}


def plain_rows(
    weight: Tensor,
    packed: Callable[[Tensor], Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Most rows for which torch's own product is faster than the packed one; 0: for none.

    Measured once per size and number of threads in a process: weights of a size are alike.

    Args:
        weight: ``[out, in]``.
        packed: ``[N, in]`` to ``[N, out]`` with the packed weight.
        clock: seconds.
    """
    key = (*weight.shape, torch.get_num_threads())
    if key not in _found:
        _found[key] = _measured(weight, packed, clock)
    return _found[key]


def _measured(
    weight: Tensor, packed: Callable[[Tensor], Tensor], clock: Callable[[], float]
) -> int:
    most = 0
    for rows in _ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        seconds = [float("inf"), float("inf")]
        for _ in range(_TRIALS):  # in turns: a neighbour's load meets both
            for which, product in enumerate((lambda y: functional.linear(y, weight), packed)):
                began = clock()
                product(x)
                seconds[which] = min(seconds[which], clock() - began)
        if seconds[0] >= _GAIN * seconds[1]:
            break
        most = rows
    return most


_LONE_TRIALS = 8
# Above the first number of rows, products have multiples of the second.
_STEPS = ((256, 32), (128, 16), (64, 8))


def filled(rows: int) -> int:
    """So many rows, or some more: the sizes that products on CPUs are computed at.

    oneDNN makes code for every new number of rows, at a millisecond a product, more than the
    product itself takes, and keeps some hundred of them: prompts, which are of any length, would
    have it made anew for ever. Batches that decode stay as they are, where a row more is dear.
    """
    for above, step in _STEPS:
        if rows > above:
            return -(-rows // step) * step
    return rows


class StackedLinear:
    """The same projection of E experts.

    On CPUs the weights are kept a second time in the layout that oneDNN's product wants: without
    it every call lays them out anew, at two to three times the cost in bfloat16 and up to twice in
    float32. Its products give a row the same bits whatever rows stand beside it, but for a row
    alone, which takes another path in float32 and at some sizes in bfloat16. Where bits must not
    depend on the batch, such a row gets a neighbour: always in bfloat16, where that costs next to
    nothing, and with ``invariant`` in float32. Without it, float32 products of few rows are
    torch's own where those are faster here, see :func:`plain_rows`.
    """

    invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take weights that are not copied: ``[E, out, in]``, bias ``[E, out]`` or None."""
        self.weight = weight
        self.bias = bias
        self._packed: list[Tensor] | None = None
        self._lone_differs = False
        self._plain_rows = 0

    @property
    def packed(self) -> bool:
        """Whether products are oneDNN's, see :func:`filled`."""
        return self._packed is not None

    def pack(self, expert: int | None = None) -> None:
        """Lay the weights (of one expert, or all) out anew, after they have changed."""
        if not packable(self.weight):
            return
        if self._packed is None or expert is None:
            self._packed = [_packed(weight) for weight in self.weight]
            self._lone_differs = self._compare_lone()
            if self.weight.dtype is torch.float32 and not self.invariant:
                self._plain_rows = plain_rows(self.weight[0], lambda x: self._product(x, 0, None))
        else:
            self._packed[expert] = _packed(self.weight[expert])

    def follow(self, earlier: StackedLinear, count: int) -> None:
        """Take over what an earlier one has laid out for the first ``count`` experts.

        Their weights must be the same; those of the others are laid out now.
        """
        self.invariant, self._lone_differs = earlier.invariant, earlier._lone_differs
        self._plain_rows = earlier._plain_rows
        if earlier._packed is not None:
            further = self.weight[count:]
            self._packed = [*earlier._packed[:count], *(_packed(weight) for weight in further)]

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """``[E', N, in]`` to ``[E', N, out]`` for the grid's E' experts."""
        if grid.single is not None:
            return self._one(x, grid.single)
        if grid.run is not None and self._packed is None:
            product = torch.bmm(x, self.weight[grid.run].transpose(1, 2))
            return product if self.bias is None else product + self.bias[grid.run, None]
        return torch.stack([self._one(x[i], e) for i, e in enumerate(grid.experts)])

    def _one(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        rows = x.numel() // x.shape[-1]
        alone = self._lone_differs and rows == 1
        half = x.dtype is not torch.float32
        faster = rows <= self._plain_rows or (alone and not (half or self.invariant))
        if self._packed is None or faster:
            return functional.linear(x, self.weight[expert], bias)
        if alone:
            return self._product(x.expand(*x.shape[:-2], 2, -1), expert, bias)[..., :1, :]
        return self._product(x, expert, bias)

    def _compare_lone(self) -> bool:
        """Whether some row's product is other bits alone than beside another."""
        weight = self.weight[0]
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(_LONE_TRIALS, weight.shape[1], generator=generator).to(weight.dtype)
        together = self._product(rows, 0, None)
        alone = torch.cat([self._product(row[None], 0, None) for row in rows])
        return not torch.equal(alone, together)

    def _product(self, x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        assert self._packed is not None
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed[expert], bias, "none", [], ""
        )
        return product


def fuse(groups: Sequence[Sequence[torch.nn.Linear]]) -> StackedLinear:
    """One projection for those that share their input, of every expert.

    Args:
        groups: ``groups[e]`` are expert e's modules; their parameters become views into the
            fused weights, so that what is copied into a module is seen here (after ``pack``).
    """
    sizes = [linear.weight.shape[0] for linear in groups[0]]
    first = groups[0][0].weight
    weight = first.new_empty(len(groups), sum(sizes), first.shape[1])
    has_bias = groups[0][0].bias is not None
    bias = first.new_empty(len(groups), sum(sizes)) if has_bias else None
    for e, group in enumerate(groups):
        for linear, part in zip(group, torch.split(weight[e], sizes), strict=True):
            adopt(linear.weight, part)
        if bias is not None:
            for linear, part in zip(group, torch.split(bias[e], sizes), strict=True):
                adopt(linear.bias, part)
    return StackedLinear(weight, bias)


def adopt(parameter: Tensor, storage: Tensor) -> None:
    """Copy a parameter to its place in shared storage and make it a view of that."""
    storage.copy_(parameter.data)
    parameter.data = storage


def stack(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """E parameters of one shape as one tensor ``[E, ...]`` of which they become views."""
    storage = parameters[0].data.new_empty(len(parameters), *parameters[0].shape)
    for parameter, part in zip(parameters, storage, strict=True):
        adopt(parameter, part)
    return storage


@contextmanager
def moving(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Move modules' parameters inside, to the end or not at all.

    Where memory runs out in the midst, parameters would lie in storage that nobody reads: weights
    that are loaded later would go there.
    """
    before = [(p, p.data) for module in modules for p in module.parameters()]
    try:
        yield
    except BaseException:
        for parameter, storage in before:
            parameter.data = storage
        raise


def packable(weight: Tensor) -> bool:
    """Whether this CPU has a packed layout for products with these weights."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed
