"""Autoscaling as configured and as Serve gets it: bounds, delays, and what replicas report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable

from paceline.actors.engine.target import replica_load
from paceline.actors.speculation.pool.replica import SessionBalancer, Utilization
from paceline.cluster.autoscaling import LoadPolicy, replica_options
from paceline.deploy import app
from paceline.deploy.cluster_app import for_cluster
from paceline.deploy.config import replica_settings
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.errors import ConfigError

NO_GPU = {"placement.target": {"GPU": 0}}  # Ray is not asked how many there are
POOL = {"drafts.placement": "pool", "drafts.topics": ["sql"]}


@dataclass
class Context:
    """The part of Serve's AutoscalingContext that the policy reads."""

    target_num_replicas: int = 1
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


def scaled(**more: Any) -> PacelineConfig:
    autoscaling = {"min_replicas": 2, "max_replicas": 5, "occupancy": 0.5, "look_back_s": 4.0}
    return load_config(None, {"target.autoscaling": autoscaling, **NO_GPU, **more})


def test_serve_gets_the_bounds_and_a_policy_that_it_can_rebuild() -> None:
    deployment = app._target(scaled())
    options = deployment._deployment_config.autoscaling_config
    assert (options.min_replicas, options.max_replicas) == (2, 5)
    assert (options.look_back_period_s, options.metrics_interval_s) == (4.0, 0.8)
    assert (options.upscale_delay_s, options.downscale_delay_s) == (10.0, 300.0)
    policy = _resolve_policy_callable(options.policy)
    full = {"load": {"a": 1.0, "b": 1.0}}
    assert policy(Context(2, 2, 5, full)) == (4, {})  # at half of their rows each


def test_without_autoscaling_the_number_is_fixed() -> None:
    assert replica_options(3, None) == {"num_replicas": 3}
    assert app._target(load_config(None, NO_GPU))._deployment_config.autoscaling_config is None


def test_what_is_shared_out_is_reckoned_with_all_replicas_that_there_may_be() -> None:
    config = scaled(**POOL, **{"target.max_num_seqs": 8, "target.max_queued_requests": 2})
    assert replica_settings._in_flight(config) == 5 * 8 + 2
    settings = replica_settings.expert_settings(
        config, replica_settings.target_settings(config), "sql"
    )
    assert settings.max_sequences == 40
    assert not settings.autoscaled
    two = load_config(None, {**POOL, "drafts.autoscaling": {"max_replicas": 3}})
    assert two.drafts.pool_processes == 6
    assert replica_settings.expert_settings(
        two, replica_settings.target_settings(two), "sql"
    ).autoscaled


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas (2) is less than min_replicas (3)"),
        ({"max_replicas": 0}, "target.autoscaling.max_replicas"),
        ({"occupancy": 0}, "target.autoscaling.occupancy"),
        ({"occupency": 0.5}, "target.autoscaling.occupency: no such key"),
    ],
)
def test_a_mistake_is_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"target.autoscaling": asked})
    assert said in str(raised.value)


def test_experts_have_no_more_replicas_than_leases() -> None:
    policy = LoadPolicy(0.5)
    busy = {"load": {"a": 1.0, "b": 0.9}, "useful": {"a": 2.0, "b": 1.0}}
    assert policy(Context(2, aggregated_metrics=busy)) == (3, {})
    assert policy(Context(2, aggregated_metrics=busy | {"useful": {"a": 1.0}})) == (1, {})


def test_without_reports_or_with_nonsense_the_policy_never_raises() -> None:
    policy = LoadPolicy(0.7)
    assert policy(Context(3, aggregated_metrics=None)) == (1, {})
    broken = {"load": {"a": float("nan")}}
    assert policy(Context(3, aggregated_metrics=broken)) == (3, {})


def test_a_queue_counts_as_full_and_the_load_rises_with_either_count() -> None:
    assert replica_load(0, 0, 16) == 0.0
    assert replica_load(8, 0, 16) == 0.5
    assert replica_load(16, 0, 16) == 1.0
    assert replica_load(4, 1, 16) > 1.0  # no memory for the fifth
    assert replica_load(16, 16, 16) == 2.0
    for waiting in (0, 3):
        loads = [replica_load(running, waiting, 16) for running in range(17)]
        assert loads == sorted(loads)


def test_the_busy_share_is_of_the_time_since_the_last_look() -> None:
    at, spent = [0.0], [0.0]
    share = Utilization(lambda: spent[0], lambda: at[0])
    assert share.sample() == 0.0
    at[0], spent[0] = 2.0, 1.0
    assert share.sample() == 0.5
    assert share.sample() == 0.5  # no time has passed
    at[0] = 4.0
    assert share.sample() == 0.0


def test_leases_are_shared_with_replicas_that_come_and_with_none_that_go() -> None:
    balancer = SessionBalancer()
    for name in ("a", "b", "c", "d", "e"):
        balancer.add(name)
    assert balancer.select_to_close(0) == []  # unknown
    assert balancer.select_to_close(1) == []
    assert balancer.select_to_close(2) == ["c", "d", "e"]
    assert len(balancer) == 2
    balancer.discard("d")  # its stream ends a little later
    assert balancer.select_to_close(2) == []
    assert balancer.select_to_close(3) == ["b"]  # two of two would leave the third replica idle
    assert balancer.select_to_close(4) == []  # one is kept
    assert balancer.select_to_close(1) == []
    balancer.discard("a")
    assert balancer.select_to_close(4) == []


@pytest.mark.parametrize(
    ("surge", "amounts", "percent"),
    [
        ("auto", {}, 100),
        ("auto", {"front": 0.01}, 100),
        ("auto", {"serving": 1.0}, 0),
        ("auto", {"GPU": 0.75}, 0),
        ("auto", {"CPU": 2.0}, 0),
        ("on", {"GPU": 1.0}, 100),
        ("off", {}, 0),
    ],
)
def test_successors_start_beside_the_old_replicas_if_they_fit(
    surge: str, amounts: dict[str, float], percent: int
) -> None:
    given = {"GPU": 0.0} | amounts
    config = load_config(None, {"placement.target": given, "placement.surge": surge})
    assert app._target(config)._deployment_config.max_surge_percent == percent


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 7.0),
        ({"target.drain_timeout_s": 3.0}, 7.0),
        ({"target.drain_timeout_s": 20.0}, 22.0),
        ({"target.drain_timeout_s": 20.0, "ingress.drain_timeout_s": 90.0}, 92.0),
        ({"target.autoscaling": {"max_replicas": 3}}, 32.0),
    ],
)
def test_a_graceful_stop_may_take_as_long_as_target_or_ingress_drains(
    changes: dict[str, object], seconds: float
) -> None:
    assert app._stop_timeout_s(load_config(None, changes)) == seconds


def test_serve_is_waited_for_beyond_its_own_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([TimeoutError, TimeoutError, None])

    def delete(_name: str) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr("ray.serve.delete", delete)
    app._delete()
    assert not list(answers)


def test_on_a_cluster_drain_timeouts_are_longer_unless_configured() -> None:
    here = load_config(None, {"weights.storage": "/shared", **NO_GPU})
    assert app._target(here)._deployment_config.graceful_shutdown_timeout_s == 5.0
    cluster = for_cluster(here)
    assert (cluster.target.drain_timeout_s, cluster.ingress.drain_timeout_s) == (30.0, 60.0)
    settings = {
        "weights.storage": "/shared",
        "target.drain_timeout_s": 7.0,
        "ingress.drain_timeout_s": 8.0,
    }
    cluster = for_cluster(load_config(None, settings))
    assert (cluster.target.drain_timeout_s, cluster.ingress.drain_timeout_s) == (7.0, 8.0)
