"""Choice of the product by the number of rows, with a mock clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine import linear as products
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.linear import StackedLinear, packable


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    before = dict(products._max_torch_rows)
    products._max_torch_rows.clear()
    yield
    products._max_torch_rows.clear()
    products._max_torch_rows.update(before)


class Costs:
    """Torch's own product takes a second a row, the packed one always so many."""

    def __init__(self, packed_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.packed_s, self.calls = 0.0, packed_s, 0

        def linear(x: Tensor, _: Tensor) -> Tensor:
            self.now += len(x)
            self.calls += 1
            return x

        monkeypatch.setattr(products.functional, "linear", linear)

    def packed(self, x: Tensor) -> Tensor:
        self.now += self.packed_s
        return x

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(("packed_s", "most"), [(1.0, 0), (2.1, 0), (3.0, 2), (6.0, 5), (99.0, 16)])
def test_torchs_product_is_used_while_it_is_faster(
    packed_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(packed_s, monkeypatch)
    weight = torch.ones(4, 3)
    assert products.max_torch_rows(weight, costs.packed, costs.clock) == most
    calls = costs.calls
    assert products.max_torch_rows(torch.zeros(4, 3), costs.packed, costs.clock) == most
    assert costs.calls == calls  # a size is measured once
    products.max_torch_rows(torch.ones(5, 3), costs.packed, costs.clock)
    assert costs.calls > calls


@pytest.mark.parametrize("invariant", [False, True])
def test_the_faster_product_is_equal_and_never_used_if_invariant(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packable(torch.zeros(1)):
        pytest.skip("this CPU has no packed products")
    monkeypatch.setattr("paceline.actors.engine.linear.max_torch_rows", lambda *_: 4)
    generator = torch.Generator().manual_seed(0)
    linear = StackedLinear(torch.randn(2, 24, 16, generator=generator))
    linear.invariant = invariant
    linear.pack()
    taken: list[int] = []

    def noted(x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        taken.append(x.numel() // x.shape[-1])
        return functional.linear(x, linear.weight[expert], bias)

    monkeypatch.setattr(linear, "_packed_product", noted)
    for rows in range(1, 8):
        x = torch.randn(1, rows, 16, generator=generator)
        torch.testing.assert_close(
            linear(x, ExpertLayout([1], x.device))[0], x[0] @ linear.weight[1].T
        )
    if invariant:
        assert {3, 4, 5, 6, 7} <= set(taken)
    else:
        assert taken == [5, 6, 7]
