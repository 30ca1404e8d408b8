"""E[tokens], speed-up, best k, break-even batch."""

from dataclasses import replace

import pytest
from planner_models import LARGE, MIXTURE, PLAIN, SMALL

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.models import ModelShape
from paceline.deploy.planner.roofline import PRESETS, Hardware, Precision
from paceline.deploy.planner.speculation import (
    Scenario,
    best_option,
    break_even_batch,
    compare,
    expected_tokens,
    largest_batch,
    last_crossing,
    options,
)


def scenario(
    target: ModelShape = LARGE,
    draft: ModelShape = SMALL,
    hardware: Hardware = PLAIN,
    context: int = 2048,
    acceptance: float = 0.8,
) -> Scenario:
    return Scenario(target, draft, hardware, hardware, Precision(), context, acceptance)


def timed(acceptance: float) -> Scenario:
    """A target whose every step takes 10 ms, a draft whose every step takes 2 ms.

    Memory and arithmetic are free, and a layer (the head is one more) costs 1 ms.
    """
    free = Hardware("free", bandwidth=1e30, flops=1e30, overhead_s=1e-3)
    nine, one = replace(LARGE, layers=9), replace(SMALL, layers=1)
    return scenario(nine, one, free, acceptance=acceptance)


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)  # (1 - 0.8^5) / 0.2
    assert expected_tokens(0.8, 0) == 1.0
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(1.0 - 1e-9, 5) == pytest.approx(6.0)


def test_speed_up_by_hand() -> None:
    found = options(timed(0.8), batch=1, max_k=5)
    # 10 * E / (10 + 2k): 1, 18/12, 24.4/14, 29.52/16, 33.616/18, 36.8928/20
    ups = [1.0, 1.5, 1.742857, 1.845, 1.867556, 1.84464]
    assert [option.speed_up for option in found] == pytest.approx(ups, rel=1e-6)
    assert found[4].draft_s == pytest.approx(8e-3)
    assert found[4].verify_s == pytest.approx(10e-3)
    assert found[4].tokens_per_second == pytest.approx(3.3616 / 18e-3)
    assert best_option(timed(0.8), 1, 5).k == 4


@pytest.mark.parametrize(("acceptance", "k"), [(0.0, 0), (0.19, 0), (0.21, 1), (1.0, 8)])
def test_best_k_follows_acceptance(acceptance: float, k: int) -> None:
    """k = 1 pays when (1 + a) * 10 / 12 > 1, which is a > 0.2."""
    assert best_option(timed(acceptance), 1, 8).k == k


def test_last_crossing_is_the_last() -> None:
    for limit in (1, 2, 36, 37, 64, 1000):
        for edge in (1, 2, 5, 37):
            expected = None if limit < edge else edge
            assert last_crossing(lambda batch, edge=edge: batch < edge, limit) == expected
    twice = {1, *range(4, 21)}  # pays, does not, and pays again
    assert last_crossing(lambda batch: batch in twice, 256) == 21
    assert last_crossing(lambda _: True, 64) is None
    assert last_crossing(lambda _: False, 64) == 1


@pytest.mark.parametrize(("target", "acceptance"), [(LARGE, 0.8), (LARGE, 0.5), (MIXTURE, 0.6)])
def test_the_break_even_batch_equals_exhaustive_search(
    target: ModelShape, acceptance: float
) -> None:
    small = replace(PRESETS["l40s"], tensor_parallel=4)
    case = scenario(target, SMALL, small, context=256, acceptance=acceptance)
    pays = [batch for batch in range(1, 513) if best_option(case, batch, 6).k > 0]
    assert len(pays) in range(1, 512)
    assert break_even_batch(case, 6, 512) == (None if max(pays) == 512 else max(pays) + 1)


def test_a_mixture_gains_least_where_more_tokens_still_hit_more_experts() -> None:
    """At batch 1, k + 1 tokens load more experts than one; at 64 all 8 are loaded anyway."""
    small = replace(PRESETS["l40s"], tensor_parallel=4)
    case = scenario(MIXTURE, SMALL, small, context=256, acceptance=0.6)
    assert best_option(case, 1, 6).speed_up < best_option(case, 64, 6).speed_up


def test_ten_tokens_of_one_or_one_of_each_of_ten() -> None:
    """The same weights, products and activations; keys and values once or ten times."""
    found = compare(scenario(context=2048), 10)
    one, many = found.one_request, found.many_requests
    assert one.weight_bytes == many.weight_bytes
    assert one.activation_bytes == many.activation_bytes
    assert one.product_flops == many.product_flops
    assert one.kv_bytes == (2048 + 10) * 327_680
    assert many.kv_bytes == 10 * (2048 + 1) * 327_680
    # GB at 1e12 a second: (139.01 + 0.45 + 6.71) / (139.01 + 0.45 + 0.67): about even
    assert found.many_requests_s / found.one_request_s == pytest.approx(1.043, abs=0.001)
    # (139.46 + 429.50) / (139.46 + 42.95): decisive
    long = compare(scenario(context=131_072), 10)
    assert long.many_requests_s / long.one_request_s == pytest.approx(3.119, abs=0.001)


def test_long_contexts_keep_speculation_worth_it_at_larger_batches() -> None:
    eight = replace(PRESETS["h100"], tensor_parallel=8)
    short = break_even_batch(scenario(hardware=eight, context=512), 8, 4096)
    assert short is not None
    assert best_option(scenario(hardware=eight, context=32_768), short, 8).k > 0


def test_memory_bounds_the_batch() -> None:
    # 2 * (70,553,706,496 + 1,235,814,400) bytes of weights; (163,840 + 16,384) values of 2 bytes
    # a position, 2,048 positions: 0.738 GB a request. 150e9 bytes leave room for 8.
    machine = replace(PLAIN, memory_bytes=150e9)
    assert largest_batch(scenario(hardware=machine)) == int(
        (150e9 - 143_579_041_792) // (180_224 * 2 * 2048)
    ) == 8  # fmt: skip
    assert largest_batch(scenario(hardware=replace(machine, memory_bytes=100e9))) == 0
    assert largest_batch(scenario()) is None


@pytest.mark.parametrize(("acceptance", "context"), [(1.1, 10), (-0.1, 10), (float("nan"), 10)])
def test_acceptance_is_a_share(acceptance: float, context: int) -> None:
    with pytest.raises(ConfigError, match="acceptance must lie between 0 and 1"):
        scenario(acceptance=acceptance, context=context)
