"""The exporter: totals become increases, and a failure affects its own sample only."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from paceline.deploy.config.config import MODELS_DIR
from paceline.deploy.monitoring.catalogue import BY_NAME, Metric
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample


class Sink:
    """Keeps records; raises for the names in ``broken``."""

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
    """Samples of the next export, or an exception to raise."""

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


def export(exporter: Exporter, source: Source, *samples: Sample | Exception) -> None:
    source.samples = list(samples)
    exporter.export()


def test_totals_become_increases_from_zero(exporter: Exporter, source: Source, sink: Sink) -> None:
    for total in (0, 0, 3, 3, 5):
        export(exporter, source, Sample("num_preemptions", total))
    assert sink.take() == [("num_preemptions", 0), ("num_preemptions", 3), ("num_preemptions", 2)]


def test_a_reset_total_is_no_decrease(exporter: Exporter, source: Source, sink: Sink) -> None:
    for total in (7, 2, 3):
        export(exporter, source, Sample("num_preemptions", total))
    assert sink.take() == [("num_preemptions", 7), ("num_preemptions", 2), ("num_preemptions", 1)]


def test_labels_are_named_and_keep_totals_apart(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    export(exporter, source, Sample("requests", 4, ("ok",)), Sample("requests", 1, ("failed",)))
    export(exporter, source, Sample("requests", 5, ("ok",)), Sample("requests", 1, ("failed",)))
    assert sink.records == [
        ("requests", 4, {"outcome": "ok"}),
        ("requests", 1, {"outcome": "failed"}),
        ("requests", 1, {"outcome": "ok"}),
    ]


def test_gauges_are_set_at_every_export_or_they_would_expire(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    for _ in range(2):
        export(exporter, source, Sample("num_requests_running", 2))
    assert sink.take() == [("num_requests_running", 2)] * 2


def test_a_failing_sink_loses_no_increase_and_no_other_sample(
    exporter: Exporter, source: Source, sink: Sink
) -> None:
    samples = Sample("num_preemptions", 3), Sample("draft_failures", 1)
    sink.broken = {"num_preemptions"}
    export(exporter, source, *samples)
    assert sink.take() == [("draft_failures", 1)]
    sink.broken = set()
    export(exporter, source, *samples)
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
def test_only_the_invalid_sample_is_skipped(
    exporter: Exporter, source: Source, sink: Sink, bad: Sample
) -> None:
    export(exporter, source, bad, Sample("draft_failures", 1))
    assert sink.take() == [("draft_failures", 1)]


def test_a_failed_read_is_retried(
    exporter: Exporter, source: Source, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            export(
                exporter, source, Sample("num_preemptions", 2), RuntimeError("changed meanwhile")
            )
    assert len(caplog.records) == 1  # not a line per second
    export(exporter, source, Sample("num_preemptions", 4))
    assert sink.take() == [("num_preemptions", 2), ("num_preemptions", 2)]


def test_the_thread_survives_a_failure_and_stops(sink: Sink) -> None:
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
    """The part of Ray's metrics that a sink uses."""

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


def test_ray_s_metrics_are_created_once_and_recorded() -> None:
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


def test_light_actors_do_not_import_torch() -> None:
    """Shard hosts and the scheduler do without torch, which would take 300 MiB of each."""
    modules = (
        "paceline.actors.replay.host",
        "paceline.cluster.scheduler.trainer_scheduler",
        "paceline.deploy.monitoring.exporter",
        "paceline.deploy.monitoring.samples",
    )
    code = (
        f"import sys, {', '.join(modules)}; print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_starts_first_does_not_import_models() -> None:
    """Command and registry, back to the shipped draft too: transformers' take five seconds."""
    modules = "paceline.deploy.app, paceline.deploy.config.user_config, paceline.cluster.supervisor"
    heavy = "{'transformers.modeling_utils', 'paceline.actors.engine.build'}"
    code = (
        f"import sys, {modules}, paceline.actors.weights.registry; "
        "from paceline.actors.weights.flat_weights import load_model; "
        f"assert load_model(sys.argv[1]).index; print({heavy} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(MODELS_DIR / "draft-smollm2")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_ray_s_classes_have_the_methods_that_the_sink_calls() -> None:
    from ray.util import metrics

    for kind, calls in (
        ("Counter", ("inc", "_record")),
        ("Gauge", ("set",)),
        ("Histogram", ("observe",)),
    ):
        assert all(hasattr(getattr(metrics, kind), call) for call in calls)
