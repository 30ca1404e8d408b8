"""Fused and stacked linear layers of several models of one architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.engine.native.plans import PackedWeight
from paceline.actors.weights.codes import Codes, codes_of, concatenated


class StackedLinear:
    """The same linear layer of E experts.

    On CPUs a second copy of the weights, or the codes of a quantized checkpoint, is laid out as
    the C++ product reads it. A row's bits do not depend on the other rows.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        codes: Sequence[Codes | None] | None = None,
        *,
        rounds: bool = False,
    ) -> None:
        """Share the weights ``[E, out, in]`` and the bias ``[E, out]`` or None, without a copy.

        Args:
            weight: of the experts.
            bias: of the experts.
            codes: of the experts' weights as they are; those of later ones are not known.
            rounds: the product may round weights to 8 bits, which are read in half of the time.
        """
        self._rounds = rounds
        self.weight = weight
        self.bias = bias
        self._codes = list(codes) if codes is not None else [None] * len(weight)
        self._kernels = kernels_for(weight.device, weight.dtype)
        self._packed: list[PackedWeight] = []

    def pack(self, expert: int | None = None) -> None:
        """Pack the weights of one expert or all again, after a change."""
        if self._kernels is None:
            return
        if not self._packed:
            self._packed = [self._pack(e) for e in range(len(self.weight))]
            return
        for e in range(len(self._packed)) if expert is None else (expert,):
            self._packed[e] = self._pack(e, self._packed[e])

    def _pack(self, expert: int, into: PackedWeight | None = None) -> PackedWeight:
        assert self._kernels is not None
        codes, self._codes[expert] = self._codes[expert], None
        if self._rounds:
            return self._kernels.pack_rounded(self.weight[expert], self._bias(expert), into)
        return self._kernels.pack(self.weight[expert], self._bias(expert), codes, into)

    def _bias(self, expert: int) -> Tensor | None:
        return None if self.bias is None else self.bias[expert]

    def copy_packed(self, other: StackedLinear, count: int) -> None:
        """Take over the packed weights of the first ``count`` experts, and pack the others."""
        if self._kernels is not None:
            own = [other._packed[e].with_bias(self._bias(e)) for e in range(count)]
            self._packed = [*own, *(self._pack(e) for e in range(count, len(self.weight)))]

    def packed(self, expert: int) -> PackedWeight:
        """The weights of an expert as the kernels read them."""
        return self._packed[expert]

    def __call__(self, x: Tensor, layout: ExpertLayout) -> Tensor:
        """``[E', N, in]`` to ``[E', N, out]`` for the layout's E' experts."""
        if layout.single is not None:
            return self._apply(x, layout.single)
        if layout.as_slice is not None and self._kernels is None:
            product = torch.bmm(x, self.weight[layout.as_slice].transpose(1, 2))
            return product if self.bias is None else product + self.bias[layout.as_slice, None]
        return torch.stack([self._apply(x[i], e) for i, e in enumerate(layout.experts)])

    def _apply(self, x: Tensor, expert: int) -> Tensor:
        if self._kernels is None:
            return functional.linear(x, self.weight[expert], self._bias(expert))
        return self._kernels.multiply(x, self._packed[expert])


def fuse(groups: Sequence[Sequence[torch.nn.Linear]], *, rounds: bool = False) -> StackedLinear:
    """Fuse linear layers that share their input, for every expert.

    Args:
        groups: modules of each expert; their parameters become views into the fused weights, so
            that copying into a module changes them too, once packed.
        rounds: see StackedLinear.
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
    codes = [concatenated([codes_of(linear.weight) for linear in group]) for group in groups]
    return StackedLinear(weight, bias, codes, rounds=rounds)


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
