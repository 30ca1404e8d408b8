"""The API's own /metrics, read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

import pytest
from engines import request
from prometheus_client.parser import text_string_to_metric_families
from unit.engine.test_stats import served

from paceline.actors.engine.stats import EngineStats
from paceline.deploy.monitoring.catalogue import VLLM_METRICS, Kind
from paceline.deploy.monitoring.vllm import ReplicaMetrics, exposition, replica_metrics


@pytest.fixture(scope="module")
def figures() -> tuple[list[Any], EngineStats]:
    """Last chunks and statistics of six requests of two topics."""
    asked = [
        request(f"r{i}", [5 + i, 7, 9], topic="sql" if i % 2 else "code", ignore_eos=True)
        for i in range(6)
    ]
    return served(asked)


def read(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Series to labels and values."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_metric_has_its_kind_and_the_engine_s_figures(
    figures: tuple[list[Any], EngineStats],
) -> None:
    chunks, stats = figures
    text = exposition("m", [replica_metrics("a", stats)])
    kinds = {f"vllm:{m.name}": str(m.kind) for m in VLLM_METRICS}
    assert {family.name: family.type for family in text_string_to_metric_families(text)} == kinds
    series = read(text)
    reported = [chunk.speculative for chunk in chunks]
    drafted, accepted = (
        sum(getattr(each, name) for each in reported)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    own = {"model_name": "m", "engine": "a"}
    assert series["vllm:spec_decode_num_draft_tokens_total"] == [(own, drafted)]
    assert series["vllm:spec_decode_num_accepted_tokens_total"] == [(own, accepted)]
    by_position = series["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(value for _, value in by_position) == accepted > 0
    assert [labels["position"] for labels, _ in by_position] == ["0", "1", "2", "3"]
    assert series["vllm:generation_tokens_total"] == [(own, 6 * 20)]
    assert series["vllm:prompt_tokens_total"] == [(own, 6 * 3)]
    finished = {labels["finished_reason"]: n for labels, n in series["vllm:request_success_total"]}
    assert finished == {"stop": 0, "length": 6, "abort": 0, "error": 0}
    assert series["vllm:kv_cache_usage_perc"] == [(own, 0.0)]


def test_histograms_are_cumulative_and_end_with_all_values(
    figures: tuple[list[Any], EngineStats],
) -> None:
    series = read(exposition("m", [replica_metrics("a", figures[1])]))
    for metric in (m for m in VLLM_METRICS if m.kind is Kind.HISTOGRAM):
        bucket, total, count = metric.vllm_series
        counts = [value for _, value in series[bucket]]
        assert counts == sorted(counts)
        assert counts[-1] == series[count][0][1]
        assert len(counts) == len(metric.buckets) + 1
        assert series[total][0][1] >= 0
    assert series["vllm:time_to_first_token_seconds_count"][0][1] == 6
    assert series["vllm:inter_token_latency_seconds_count"][0][1] >= 6
    assert series["vllm:request_generation_tokens_sum"][0][1] == 6 * 20
    within = {labels["le"]: n for labels, n in series["vllm:request_prompt_tokens_bucket"]}
    assert (within["2.0"], within["5.0"], within["+Inf"]) == (0, 6, 6)


def test_replicas_are_series_of_one_family(figures: tuple[list[Any], EngineStats]) -> None:
    one = replica_metrics("b", figures[1])
    text = exposition('a "model"\n', [one, ReplicaMetrics("a", one.samples, one.histograms)])
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    running = read(text)["vllm:num_requests_running"]
    assert [labels["engine"] for labels, _ in running] == ["a", "b"]
    assert {labels["model_name"] for labels, _ in running} == {'a "model"\n'}
