"""The exporter: totals become increases, and nothing that fails goes further than itself."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from paceline.deploy.monitoring.catalogue import BY_NAME, Metric
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample


class Sink:
    """Keeps what it is given; raises for the names in ``broken``."""

    def __init__(self) -> None:
        self.records: list[tuple[str, float, dict[str, str]]] = []
        self.broken: set[str] = set()
        self.recorded = threading.Event()

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        if metric.name in self.broken:
            raise RuntimeError("the agent is gone")
        self.records.append((metric.name, value, dict(labels)))
        self.recorded.set()

    def take(self) -> list[tuple[str, float]]:
        taken = [(name, value) for name, value, _ in self.records]
        self.records.clear()
        return taken


class Source:
    """What is read: the samples of the next turn, or an exception to raise."""

    def __init__(self) -> None:
        self.samples: list[Sample | Exception] = []

    def __call__(self) -> Iterator[Sample]:
        for sample in self.samples:
            if isinstance(sample, Exception):
                raise sample
            yield sample


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def exporter(source: Source, sink: Sink) -> Exporter:
    return Exporter(source, sink)


def turn(exporter: Exporter, source: Source, *samples: Sample | Exception) -> None:
    source.samples = list(samples)
    exporter.export()


def test_totals_become_increases_from_a_beginning_at_zero(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    for total in (0, 0, 3, 3, 5):
        turn(exporter, source, Sample("num_preemptions", total))
    assert sink.take() == [("num_preemptions", 0), ("num_preemptions", 3), ("num_preemptions", 2)]


def test_a_total_that_was_counted_anew_is_no_fall(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    for total in (7, 2, 3):
        turn(exporter, source, Sample("num_preemptions", total))
    assert sink.take() == [("num_preemptions", 7), ("num_preemptions", 2), ("num_preemptions", 1)]


def test_labels_are_named_and_keep_totals_apart(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    turn(exporter, source, Sample("requests", 4, ("ok",)), Sample("requests", 1, ("failed",)))
    turn(exporter, source, Sample("requests", 5, ("ok",)), Sample("requests", 1, ("failed",)))
    assert sink.records == [
        ("requests", 4, {"outcome": "ok"}),
        ("requests", 1, {"outcome": "failed"}),
        ("requests", 1, {"outcome": "ok"}),
    ]


def test_gauges_are_set_every_turn_or_they_would_fade(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    for _ in range(2):
        turn(exporter, source, Sample("num_requests_running", 2))
    assert sink.take() == [("num_requests_running", 2)] * 2


def test_a_sink_that_fails_loses_no_increase_and_stops_nobody_else(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    samples = Sample("num_preemptions", 3), Sample("draft_failures", 1)
    sink.broken = {"num_preemptions"}
    turn(exporter, source, *samples)
    assert sink.take() == [("draft_failures", 1)]
    sink.broken = set()
    turn(exporter, source, *samples)
    assert sink.take() == [("num_preemptions", 3)]


@pytest.mark.parametrize(
    "bad",
    [
        Sample("no_such_metric", 1.0),
        Sample("requests", 1.0),
        Sample("requests", 1.0, ("ok", "too many")),
        Sample("predicted_goodput", math.nan),
        Sample("predicted_goodput", math.inf),
        Sample("num_preemptions", math.nan),
    ],
)
def test_a_bad_sample_is_left_out_alone(
    exporter: Exporter, source: Source, sink: Sink, bad: Sample
) -> None:
    turn(exporter, source, bad, Sample("draft_failures", 1))
    assert sink.take() == [("draft_failures", 1)]


def test_figures_that_cannot_be_read_are_read_again(
    exporter: Exporter, source: Source, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            turn(exporter, source, Sample("num_preemptions", 2), RuntimeError("changed meanwhile"))
    assert len(caplog.records) == 1  # not a line a second
    turn(exporter, source, Sample("num_preemptions", 4))
    assert sink.take() == [("num_preemptions", 2), ("num_preemptions", 2)]


def test_the_thread_goes_on_after_a_failure_and_ends_when_told(sink: Sink) -> None:
    turns = 0

    def read() -> Iterable[Sample]:
        nonlocal turns
        turns += 1
        if turns == 1:
            raise RuntimeError("not up")
        return [Sample("num_preemptions", turns)]

    exporter = Exporter(read, sink, every_s=0.001).start()
    assert sink.recorded.wait(10)
    exporter.stop()


class Made:
    """One of Ray's metrics, as far as a sink uses it."""

    def __init__(self, name: str, **facts: Any) -> None:
        self.name, self.facts = name, facts
        self.calls: list[tuple[str, float, dict[str, str]]] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0  # as Ray's does
        self.calls.append(("inc", value, tags))

    def _record(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("record", value, tags))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("set", value, tags))

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.calls.append(("observe", value, tags))


class Module:
    """As `ray.util.metrics`."""

    Counter = Gauge = Histogram = Made


def test_ray_s_metrics_are_made_once_and_get_what_they_take() -> None:
    sink = RaySink(Module)
    counter, gauge = BY_NAME["requests"], BY_NAME["num_requests_running"]
    histogram = BY_NAME["time_to_first_token_seconds"]
    sink.record(counter, 0.0, {"outcome": "ok"})
    sink.record(counter, 2.0, {"outcome": "ok"})
    sink.record(gauge, 0.0, {})
    sink.record(histogram, 0.3, {})
    made = sink._metrics
    assert made["requests"].name == "paceline_requests"
    assert made["requests"].facts["tag_keys"] == ("outcome",)
    calls = [("record", 0.0, {"outcome": "ok"}), ("inc", 2.0, {"outcome": "ok"})]
    assert made["requests"].calls == calls
    assert made["num_requests_running"].calls == [("set", 0.0, {})]
    assert made["time_to_first_token_seconds"].facts["boundaries"][0] > 0
    assert made["time_to_first_token_seconds"].calls == [("observe", 0.3, {})]


def test_ray_s_own_classes_have_what_the_sink_calls() -> None:
    from ray.util import metrics

    for kind, calls in (
        ("Counter", ("inc", "_record")),
        ("Gauge", ("set",)),
        ("Histogram", ("observe",)),
    ):
        assert all(hasattr(getattr(metrics, kind), call) for call in calls)
