"""Bytes, FLOPs and seconds of a step, against values computed by hand."""

import itertools
from dataclasses import replace

import pytest
from planner_models import LARGE, MIXTURE, PLAIN

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.roofline import (
    PRESETS,
    Hardware,
    Precision,
    distinct_experts,
    step_time,
    step_work,
)

BF16 = Precision()


def test_one_token_of_a_70b_at_2k() -> None:
    work = step_work(LARGE, BF16, rows=1, tokens=1, context=2048)
    # all but the embedding, 70,553,706,496 - 128256*8192 = 69,503,033,344, and one of its rows
    assert work.weight_bytes == 2 * (69_503_033_344 + 8_192)
    # 2,048 positions read and one written, 327,680 bytes each
    assert work.kv_bytes == 2_049 * 327_680 == 671_416_320
    # a layer: q, k, v and result 2*128*(64+8) = 18,432, residual 4*8192 = 32,768, gate, up and
    # product 3*28672 = 86,016: 137,216 numbers, x80, written and read in 2 bytes; logits in 4
    assert work.activation_bytes == 80 * 137_216 * 2 * 2 + 128_256 * 2 * 4
    assert work.product_flops == 2 * 69_503_033_344
    # scores and weighted values: 2*2 * 64 heads * 128 * 2,049 positions * 80 layers
    assert work.attention_flops == 5_371_330_560


def test_a_step_is_as_slow_as_its_scarcest_resource() -> None:
    one = step_time(step_work(LARGE, BF16, 1, 1, 2048), PLAIN)
    # (139,006,083,072 + 44,935,168) bytes and 671,416,320 bytes at 1e12 a second
    assert one.products_s == pytest.approx(0.13905101824)
    assert one.attention_s == pytest.approx(0.00067141632)
    assert one.seconds == pytest.approx(0.13972243456)
    many = step_time(step_work(LARGE, BF16, 1, 4096, 2048), PLAIN)
    # 2 * 69,503,033,344 * 4096 FLOPs at 1e15 a second: more than the bytes take
    assert many.products_s == pytest.approx(0.56936884916)


def test_without_overlap_bytes_and_flops_add_up() -> None:
    time = step_time(step_work(LARGE, BF16, 1, 1, 2048), replace(PLAIN, overlaps=False))
    assert time.products_s == pytest.approx(0.13905101824 + 0.000139006066688)
    assert time.attention_s == pytest.approx(0.00067141632 + 5_371_330_560e-15)


def test_overhead_counts_the_head_as_a_layer() -> None:
    machine = replace(PLAIN, overhead_s=1e-5)
    assert step_time(step_work(LARGE, BF16, 1, 1, 1), machine).overhead_s == pytest.approx(81e-5)


def test_tensor_parallelism_divides_bytes_and_adds_two_reductions_a_layer() -> None:
    work = step_work(LARGE, BF16, 1, 1, 2048)
    eight = replace(PLAIN, tensor_parallel=8, interconnect=1e11, reduce_latency_s=1e-5)
    time = step_time(work, eight)
    assert time.products_s == pytest.approx(0.13905101824 / 8)
    assert time.attention_s == pytest.approx(0.00067141632 / 8)
    # a ring carries 2*7/8 of 8192 numbers of 2 bytes, 28,672: 0.28672 us, and 10 us; 160 times
    assert time.reduce_s == pytest.approx(160 * 10.28672e-6)
    # 8 key/value heads are not divided among 16: each pair keeps the same
    sixteen = step_time(work, replace(eight, tensor_parallel=16))
    assert sixteen.attention_s == pytest.approx(time.attention_s)
    assert sixteen.products_s == pytest.approx(time.products_s / 2)


def test_a_smaller_number_format_moves_less() -> None:
    half = step_work(LARGE, Precision(weight=0.5, kv=1.0), 4, 2, 1000)
    full = step_work(LARGE, BF16, 4, 2, 1000)
    assert half.weight_bytes == full.weight_bytes / 4
    assert half.kv_bytes == full.kv_bytes / 2
    assert half.flops == full.flops


@pytest.mark.parametrize(("count", "per_token", "tokens"), [(4, 2, 2), (5, 1, 3), (4, 3, 2)])
def test_distinct_experts_is_the_mean_over_every_routing(
    count: int, per_token: int, tokens: int
) -> None:
    choices = list(itertools.combinations(range(count), per_token))
    routings = list(itertools.product(choices, repeat=tokens))
    mean = sum(len(set().union(*routing)) for routing in routings) / len(routings)
    assert distinct_experts(count, per_token, tokens) == pytest.approx(mean)


def test_more_tokens_load_more_experts() -> None:
    # 8 experts, 2 a token: 2 for one token, 8*(1 - 0.75^2) = 3.5 for two
    expert, common = 176_160_768, MIXTURE.common_parameters
    one = step_work(MIXTURE, BF16, 1, 1, 10).weight_bytes
    assert one == pytest.approx(2 * (common + 4096 + 32 * 2 * expert))
    two = step_work(MIXTURE, BF16, 1, 2, 10).weight_bytes
    assert two == pytest.approx(2 * (common + 2 * 4096 + 32 * 3.5 * expert))
    assert step_work(MIXTURE, BF16, 2, 1, 10).weight_bytes == two


def test_copies_are_each_read() -> None:
    one, two = (step_work(LARGE, BF16, 4, 1, 10, copies=copies) for copies in (1, 2))
    assert two.weight_bytes == pytest.approx(2 * one.weight_bytes, rel=1e-6)
    assert (two.kv_bytes, two.flops) == (one.kv_bytes, one.flops)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth": 0.0}, "must be positive"),
        ({"flops": float("nan")}, "must be positive"),
        ({"bandwidth": float("inf")}, "positive and finite"),
        ({"flops": float("inf")}, "positive and finite"),
        ({"memory_bytes": -1.0}, "positive and finite"),
        ({"memory_bytes": float("nan")}, "positive and finite"),
        ({"memory_bytes": float("inf")}, "positive and finite"),
        ({"interconnect": -1.0}, "positive and finite"),
        ({"overhead_s": -1.0}, "finite and not negative"),
        ({"overhead_s": float("nan")}, "finite and not negative"),
        ({"reduce_latency_s": float("inf")}, "finite and not negative"),
        ({"tensor_parallel": 2}, "--interconnect-gbs"),
        ({"tensor_parallel": 0}, "at least 1"),
    ],
)
def test_machines_that_cannot_be_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Hardware(**{"name": "x", "bandwidth": 1.0, "flops": 1.0, **change})  # type: ignore[arg-type]


def test_presets_can_be_shared_by_several() -> None:
    gpus = {name: preset for name, preset in PRESETS.items() if name != "cpu"}
    assert set(gpus) == {"h100", "h200", "a100", "l40s"}
    for preset in gpus.values():
        assert replace(preset, tensor_parallel=2).tensor_parallel == 2
