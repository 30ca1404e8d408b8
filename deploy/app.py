"""Start the application on the local machine: Ray, the learning actors, Serve.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig

from paceline.actors.engine.target_handle import TargetStatus
from paceline.actors.replay.host import shard_of
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.training.trainer import TrainerHandle
from paceline.actors.weights.subscriber import RegistryHandle
from paceline.cluster import session
from paceline.cluster.autoscaling import least_replicas, replica_options
from paceline.cluster.learning_actors import LearningActors
from paceline.cluster.placement import (
    Booking,
    actor_options,
    booked,
    find_misfit,
    share_of_gpus,
    surge_percent,
)
from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle
from paceline.cluster.supervisor import ActorHandle, TopicSupervisor, TrainerSupervisor
from paceline.deploy import learning
from paceline.deploy.api.listener import Port
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.preflight import check
from paceline.deploy.config.replica_settings import (
    expert_settings,
    ingress_settings,
    router_arguments,
    target_settings,
)
from paceline.deploy.errors import ConfigError, StartError, cause_of
from paceline.deploy.monitoring.ingress import MeteredIngress
from paceline.deploy.signals import handlers_restored, signals_ignored

logger = logging.getLogger(__name__)

APPLICATION = "paceline"
# The ingress limits concurrency, with errors in OpenAI's shape: Serve must not.
_UNBOUNDED = 100_000
# By name: the driver then need not import torch and transformers, which takes seconds.
_TARGET_CLASS: Any = "paceline.deploy.monitoring.target.MeteredTarget"
_ROUTER_CLASS: Any = "paceline.actors.router.router.TopicRouter"
_EXPERT_CLASS: Any = "paceline.actors.speculation.pool.replica.ExpertReplica"
_REPLICA_CHOICE = "paceline.cluster.replica_choice.ReplicaChoice"
_START_TIMEOUT_S = 60.0
_STOP_MARGIN_S = 2.0  # of a graceful stop, beyond the drain timeouts
# Of target and ingress on one machine, which stop together; and of a target that is scaled down.
_DRAIN_TIMEOUT_S, _DOWNSCALE_DRAIN_TIMEOUT_S = 5.0, 30.0
# Of Serve's processes.
_SERVE_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # between processes: less work for every chunk
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.4",  # Ray's 0.1 takes a hundredth of a core
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # likewise 100
    "HF_HUB_OFFLINE": "1",
}
_SERVE_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}


@dataclass
class RunningApp:
    """A running application.

    Attributes:
        base_url: scheme, host and port; the API is below ``/v1``.
        shards: expert to handle of its replay shard.
        registry: handle of the weight registry.
        scheduler: handle of the trainer scheduler.
        trainers: gives the handles of the running trainers by name.
        target: its status at the start.
    """

    base_url: str
    shards: dict[str, ShardHandle]
    registry: RegistryHandle
    scheduler: TrainerSchedulerHandle
    trainers: Callable[[], dict[str, TrainerHandle]]
    target: TargetStatus
    _stops: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _stop_timeout_s: float = field(default=0.0, repr=False)

    @property
    def trainer(self) -> TrainerHandle | None:
        """Handle of the first running trainer, or None."""
        return next(iter(self.trainers().values()), None)

    def stop(self) -> None:
        """Stop everything that :func:`start` started; a second call does nothing.

        Signals are ignored meanwhile; processes that do not stop in time are killed.
        """
        _run_all(self._stops, self._stop_timeout_s)

    def __enter__(self) -> "RunningApp":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(config: PacelineConfig, *, checked: bool = False) -> RunningApp:
    """Start Ray, the learning actors, router, target and ingress; return when they are ready.

    Args:
        config: see PacelineConfig.
        checked: whether the caller has run ``preflight.check``.

    Raises:
        ConfigError: before anything but Ray is started.
        StartError: a part does not start; all others are stopped again.
    """
    if not checked:
        check(config)
    config = config.with_added_topics()
    stops: list[Callable[[], None]] = []
    try:
        return _start(config, stops)
    except BaseException as error:
        _run_all(stops, _stop_timeout_s(config))
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            raise StartError(f"Paceline did not start: {cause_of(error)}") from error
        raise


def _start(config: PacelineConfig, stops: list[Callable[[], None]]) -> RunningApp:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = Port(config.host, config.port)

    def end() -> None:
        session.stop_ray()
        port.close()

    stops.append(end)
    with handlers_restored():
        session.start_ray(
            num_cpus=config.ray.num_cpus,
            dashboard=config.ray.dashboard,
            dashboard_port=config.ray.dashboard_port,
            object_store_mb=config.ray.object_store_mb,
            log_to_driver=config.ray.log_to_driver,
            environment=_SERVE_ENV | session.thread_environment(1),
        )
    if (misfit := find_misfit(_bookings(config), ray.cluster_resources())) is not None:
        raise ConfigError(misfit)
    with handlers_restored():
        starting = session.in_background(partial(learning.start_actors, config))  # beside Serve
        serve.start(proxy_location="Disabled", logging_config=_SERVE_LOGGING)
        actors = starting.result()
    stops.append(actors.stop)
    trainers = TrainerSupervisor(
        learning.trainer_factories(config), learning.trainer_booking(config), actors.scheduler
    ).start()
    stops.append(trainers.stop)
    stops.append(_delete)
    _deploy(build_app(config, actors, port.name))
    _wait_for(actors.required(), _START_TIMEOUT_S)
    shards = dict(actors.shards)
    start_expert = partial(_start_expert, config, actors.registry)
    topics = TopicSupervisor(
        actors.registry,
        shards,
        partial(shard_of, hosts=actors.shard_hosts),
        start_expert if config.drafts.placement == "pool" else None,
    )
    stops.append(topics.stop)
    target = _target_status()
    host = f"[{config.host}]" if ":" in config.host else config.host
    return RunningApp(
        base_url=f"http://{host}:{config.port}",
        shards=shards,
        registry=actors.registry,
        scheduler=actors.scheduler,
        trainers=trainers.handles,
        target=target,
        _stops=stops,
        _stop_timeout_s=_stop_timeout_s(config),
    )


def _wait_for(actors: Mapping[str, ActorHandle], seconds: float) -> None:
    """Wait until all answer.

    Raises:
        StartError: names one that did not answer within ``seconds``, and the cause.
    """
    answers = {name: actor.ping.remote() for name, actor in actors.items()}
    deadline = time.monotonic() + seconds
    for name, answer in answers.items():
        try:
            ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except RayError as error:
            raise StartError(f"the {name} does not come up: {cause_of(error)}") from error


def _deploy(application: serve.Application) -> None:
    """``serve.run``, with the cause of a replica that does not start."""
    try:
        serve.run(application, name=APPLICATION, route_prefix=None, logging_config=_SERVE_LOGGING)
    except RuntimeError as error:
        deployments = serve.status().applications[APPLICATION].deployments
        causes = [
            f"{name}: {cause_of(RuntimeError(facts.message))}"
            for name, facts in deployments.items()
            if facts.status == "DEPLOY_FAILED"
        ]
        raise StartError("; ".join(causes) or str(error)) from error


def _start_expert(
    config: PacelineConfig, registry: RegistryHandle, expert: str, added: list[str]
) -> tuple[str, str]:
    """Start an added topic's expert as an application of its own.

    Redeploying the whole application would replace all its replicas.
    """
    name = f"{APPLICATION}-{expert}"
    config = config.with_topics(added)
    deployment = _expert(config, expert)
    bound = deployment.bind(expert_settings(config, target_settings(config), expert), registry)
    serve.run(bound, name=name, route_prefix=None, logging_config=_SERVE_LOGGING)
    return deployment.name, name


def _target_status() -> TargetStatus:
    handle = serve.get_deployment_handle("target", APPLICATION)
    try:
        status: TargetStatus = handle.status.remote().result(timeout_s=_START_TIMEOUT_S)
    finally:
        # With autoscaling it reports for ever, and would restart Ray after this session's end.
        handle.shutdown()
    return status


def _bookings(config: PacelineConfig) -> list[Booking]:
    """What the processes of the start book, those of trainers last."""
    target, drafts, placement = config.target, config.drafts, config.placement
    targets = least_replicas(target.num_replicas, target.autoscaling)
    router = config.router.enabled and config.router.placement == "deployment"
    experts = len(config.experts) if drafts.placement == "pool" else 0
    experts *= least_replicas(drafts.num_replicas, drafts.autoscaling)
    trainers = len(learning.trainer_factories(config))
    ranks = trainers * (config.training.ranks - 1)
    of_each = [
        ("placement.learning", actor_options(placement.learning), len(learning.factories(config))),
        ("placement.ingress", actor_options(placement.ingress), config.ingress.num_replicas),
        ("placement.router", actor_options(placement.router), int(router)),
        ("placement.experts", actor_options(placement.experts), experts),
        ("drafts.num_gpus", actor_options({}, drafts.num_gpus), experts),
        ("placement.target", _target_options(config), targets),
        ("placement.trainer", learning.trainer_options(config), trainers),
        ("training.ranks", learning.rank_options(config), ranks),
    ]
    return [Booking(key, booked(options), count) for key, options, count in of_each]


def build_app(
    config: PacelineConfig,
    actors: LearningActors,
    port: str | tuple[str, int],
    *,
    no_topics: str | None = None,
) -> serve.Application:
    """The Serve application: ingress over router and target.

    Args:
        config: see PacelineConfig.
        actors: the learning actors.
        port: of the ingress, see ``listener.listening_socket``.
        no_topics: why no topic can be added while it runs; None if the config decides.
    """
    settings = target_settings(config, _target_options(config)["num_gpus"])
    pool = config.experts if config.drafts.placement == "pool" else ()
    target = _target(config).bind(
        settings,
        dict(actors.shards),
        actors.registry,
        actors.scheduler,
        {
            expert: _expert(config, expert).bind(
                expert_settings(config, settings, expert), actors.registry
            )
            for expert in pool
        },
        actors.scorer,
    )
    router = None
    if config.router.enabled and config.router.placement == "deployment":
        router = _router(config).bind(*router_arguments(config), actors.registry)
    return _ingress(config).bind(port, ingress_settings(config, no_topics), target, router, actors)


# By default no CPUs are booked. Every process has one numerics thread by its environment; target,
# router and trainer set their own number, which saves a runtime_env and a second worker start.


def _target(config: PacelineConfig) -> serve.Deployment:
    return serve.deployment(
        name="target",
        **replica_options(config.target.num_replicas, config.target.autoscaling),
        max_ongoing_requests=_UNBOUNDED,
        **_resources(config, _target_options(config)),
        graceful_shutdown_timeout_s=_target_drain_s(config),
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=max(config.target.stall_timeout_s, 5.0),
        request_router_config=RequestRouterConfig(request_router_class=_REPLICA_CHOICE),
    )(_TARGET_CLASS)


def _resources(config: PacelineConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The resources of a replica, and whether its successor starts before it stops."""
    percent = surge_percent(config.placement.surge, options)
    return {"ray_actor_options": options, "max_surge_percent": percent}


def _target_options(config: PacelineConfig) -> dict[str, Any]:
    return actor_options(config.placement.target, _gpu_share(config))


def _gpu_share(config: PacelineConfig) -> float:
    """GPUs of a target replica: an equal share of what trainers and a pool's experts leave."""
    if "GPU" in config.placement.target:
        return config.placement.target["GPU"]
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0 or config.target.device == "cpu":
        return 0
    trainers, replicas = config.training.trainers, config.target.most_replicas
    ranks = trainers * (config.training.ranks - 1)
    taken = {
        "training.trainers": trainers * [learning.trainer_gpus(config)],
        "training.ranks": ranks * [learning.rank_options(config)["num_gpus"]],
        "drafts.num_gpus": config.drafts.pool_processes * [config.drafts.num_gpus],
    }
    share = share_of_gpus(gpus, chain(*taken.values()), replicas)
    if not share:
        amounts = {key: sum(bookings) for key, bookings in taken.items()}
        raise ConfigError(
            f"{max(amounts, key=amounts.__getitem__)}: trainers, their further ranks and experts "
            f"take {sum(amounts.values()):g} of {gpus} GPUs, and leave no room on a device for "
            f"each of the target's {replicas} replicas"
        )
    return share


def _expert(config: PacelineConfig, expert: str) -> serve.Deployment:
    return serve.deployment(
        name=f"expert-{expert}",
        **replica_options(config.drafts.num_replicas, config.drafts.autoscaling),
        max_ongoing_requests=_UNBOUNDED,  # a session is a request that lasts as long as its target
        ray_actor_options=actor_options(config.placement.experts, config.drafts.num_gpus),
        graceful_shutdown_timeout_s=1,  # sessions end only with their targets
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=20,
    )(_EXPERT_CLASS)


def _router(config: PacelineConfig) -> serve.Deployment:
    return serve.deployment(
        name="router",
        max_ongoing_requests=_UNBOUNDED,
        **_resources(config, actor_options(config.placement.router)),
        health_check_period_s=5,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=1,
        graceful_shutdown_wait_loop_s=0.2,
    )(_ROUTER_CLASS)


def _ingress(config: PacelineConfig) -> serve.Deployment:
    return serve.deployment(
        name="ingress",
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=_UNBOUNDED,
        **_resources(config, actor_options(config.placement.ingress)),
        graceful_shutdown_timeout_s=_ingress_drain_s(config),
        graceful_shutdown_wait_loop_s=0.2,
    )(MeteredIngress)


def _target_drain_s(config: PacelineConfig) -> float:
    default = _DOWNSCALE_DRAIN_TIMEOUT_S if config.target.autoscaling else _DRAIN_TIMEOUT_S
    return config.target.drain_timeout_s or default


def _ingress_drain_s(config: PacelineConfig) -> float:
    return config.ingress.drain_timeout_s or _DRAIN_TIMEOUT_S


def _stop_timeout_s(config: PacelineConfig) -> float:
    """Of a graceful stop: target and ingress drain at the same time."""
    return max(_target_drain_s(config), _ingress_drain_s(config)) + _STOP_MARGIN_S


def _delete() -> None:
    """Delete the application, and wait for it."""
    deleted = False
    while not deleted:
        with suppress(TimeoutError):  # Serve waits for a minute at most
            serve.delete(APPLICATION)
            deleted = True


def _run_all(stops: list[Callable[[], None]], seconds: float) -> None:
    """Run and remove the stop functions, the newest first.

    The oldest stops the session and kills what is left; the others are for a graceful stop, within
    ``seconds`` together, and are skipped if the session is dead.
    """
    deadline = time.monotonic() + seconds
    with signals_ignored():
        while len(stops) > 1:
            stop = stops.pop()
            session.run_bounded(stop, max(0.0, deadline - time.monotonic()))
        while stops:
            stops.pop()()
