"""Factories of the learning actors, from the configuration, and the actor of a trainer.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import ray
from ray.util import metrics

from paceline.actors.cores import available_cores
from paceline.actors.engine.target_handle import TargetHandle
from paceline.actors.priority import lower_priority
from paceline.actors.replay.host import ShardHost, ShardHostHandle, remove_records
from paceline.actors.training.permits import TrainerIdentity
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.scorer import Scorer, ScorerTable
from paceline.actors.training.synthetic.generator import SyntheticAnswers
from paceline.actors.training.trainer import Trainer, TrainerHandle
from paceline.actors.weights.state_folder import fingerprints
from paceline.actors.weights.subscriber import RegistryHandle
from paceline.cluster.learning_actors import (
    REGISTRY,
    SCHEDULER,
    SHARDS,
    TRAINER,
    LearningActors,
    numbered,
    restarted_actor,
    trainer_slots,
)
from paceline.cluster.named_actor import NamedActor
from paceline.cluster.placement import actor_options, booked
from paceline.cluster.rank_actors import node_address, worker_starter
from paceline.cluster.scheduler.leases import SchedulerSettings
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler, TrainerSchedulerHandle
from paceline.cluster.supervisor import ActorFactory, ActorHandle
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig
from paceline.deploy.config.learning_settings import (
    evaluates_experts,
    occupied_above,
    replay_settings,
    scorer_settings,
    synthetic_settings,
    trainer_settings,
)
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample, metered
from paceline.deploy.monitoring.samples import (
    registry_samples,
    scheduler_samples,
    shard_samples,
    trainer_samples,
)

if TYPE_CHECKING:
    from paceline.actors.training.expert_evaluation import ExpertEvaluator
    from paceline.actors.training.settings import ScorerSettings

logger = logging.getLogger(__name__)

_REPLAY_FOLDER = "replay"  # of the state folder
_TRAINER_GPU_SHARE = 0.25
_YIELD_S, _YIELD_ON_CPU_S = 2.0, 60.0


def start_actors(config: PacelineConfig) -> LearningActors:
    """Start all but the trainers under their names; Ray restarts those that die."""
    remove_stray_records(config)
    actors = {name: start() for name, start in factories(config).items()}
    return _find(config, actors.__getitem__)


def remove_stray_records(config: PacelineConfig) -> None:
    """Remove records on disk that no shard would let expire, or purge.

    Those of the other ``replay.scope``, and all if there are no shards.
    """
    folders = [config.other_state_path]
    if not shard_hosts(config):
        folders.append(config.state_path)
    for folder in folders:
        remove_records(folder / _REPLAY_FOLDER)


def named_actors(config: PacelineConfig) -> LearningActors:
    """The same actors by their names, for processes that have not started them."""
    return _find(config, NamedActor)


def _find(config: PacelineConfig, handle: Callable[[str], Any]) -> LearningActors:
    return LearningActors.find(
        config.experts,
        list(trainer_factories(config)),
        shard_hosts=shard_hosts(config),
        scores=evaluates_experts(config),
        handle=handle,
    )


def factories(config: PacelineConfig) -> dict[str, ActorFactory[ActorHandle]]:
    """Name to factory, of all actors but the trainers, which need them all."""
    found: dict[str, ActorFactory[ActorHandle]] = {
        name: partial(_shard_host, config, name, index)
        for index, name in enumerate(numbered(SHARDS, shard_hosts(config)))
    }
    return found | {REGISTRY: partial(_registry, config), SCHEDULER: partial(_scheduler, config)}


def trainer_factories(config: PacelineConfig) -> dict[str, ActorFactory[TrainerHandle]]:
    """Trainer to factory; none if training is disabled."""
    count = config.training.trainers if config.training.enabled else 0
    return {name: partial(_trainer, config, name) for name in numbered(TRAINER, count)}


def trainer_booking(config: PacelineConfig) -> dict[str, float]:
    """What Ray books for each trainer."""
    return booked(trainer_options(config))


def shard_hosts(config: PacelineConfig) -> int:
    """Number of actors that hold the replay shards: one per trainer, which samples from them."""
    trainers = config.training.trainers if config.training.enabled else 1
    return trainers if config.experts else 0


def _shard_host(config: PacelineConfig, name: str, index: int) -> ShardHostHandle:
    metered_host = metered(ShardHost, lambda h: chain.from_iterable(map(shard_samples, h.stats())))
    host = _restarted(config, metered_host, name)
    hosts, settings = shard_hosts(config), replay_settings(config)
    handle: ShardHostHandle = host.remote(
        *(index, hosts, config.experts, settings, str(config.state_path / _REPLAY_FOLDER)),
        persist=config.replay.persist,
    )
    return handle


def _scheduler(config: PacelineConfig) -> TrainerSchedulerHandle:
    metered_scheduler = metered(
        TrainerScheduler, lambda s: scheduler_samples(s.status(), s.pop_yield_times())
    )
    scheduler = _restarted(config, metered_scheduler, SCHEDULER)
    occupied = occupied_above(config, available_cores())
    default_s = _YIELD_S if _has_gpu(config) else _YIELD_ON_CPU_S
    settings = SchedulerSettings(yield_timeout_s=config.training.yield_timeout_s or default_s)
    handle: TrainerSchedulerHandle = scheduler.remote(
        config.training.idle_after_s, occupied_above=occupied, settings=settings
    )
    return handle


def _registry(config: PacelineConfig) -> RegistryHandle:
    from paceline.actors.weights.canary import CanarySettings
    from paceline.actors.weights.registry import WeightRegistry  # imports torch

    metered_registry = metered(WeightRegistry, lambda r: registry_samples(r.metrics()))
    registry = _restarted(config, metered_registry, REGISTRY)
    handle: RegistryHandle = registry.remote(
        directory=str(config.state_path / WEIGHTS_FOLDER),
        topics=config.experts,
        fingerprint=fingerprints(config.target_path, config.draft_paths),
        keep_versions=config.training.keep_versions,
        canary=CanarySettings() if config.training.effective_canary_share else None,
        initial={expert: str(path) for expert, path in config.draft_paths.items()},
    )
    return handle


def _restarted(config: PacelineConfig, cls: type, name: str) -> Any:
    return restarted_actor(cls, name, actor_options(config.placement.learning))


def _trainer(config: PacelineConfig, name: str) -> TrainerHandle:
    actor = restarted_actor(TrainerActor, name, trainer_options(config))
    handle: TrainerHandle = actor.remote(config, name)
    return handle


def trainer_options(config: PacelineConfig) -> dict[str, Any]:
    """Ray's options of a trainer."""
    return actor_options(config.placement.trainer, trainer_gpus(config))


class TrainerActor(Trainer):
    """A trainer; the first one also runs the scorer and makes synthetic records.

    It finds the other actors by name: handles among the arguments would be objects that a restart
    may not find.
    """

    def __init__(self, config: PacelineConfig, name: str = TRAINER) -> None:
        """See Trainer; ``name`` is the actor's."""
        actors = named_actors(config)
        shards, registry, scheduler = actors.shards, actors.registry, actors.scheduler
        for actor in actors.required().values():
            actor.find()  # raises if it was never started
        # The registry has the shards of topics added since the start.
        config = config.with_added_topics()
        # Importing torch takes seconds of a core that starting replicas need more.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with ThreadPoolExecutor(1, initializer=lower_priority) as beside:
            settings = beside.submit(trainer_settings, config).result()
            evaluator = beside.submit(load_evaluator, config).result() if name == TRAINER else None
        start_worker = worker_starter(
            settings.num_threads, settings.group_timeout_s, rank_options(config)
        )
        threads = config.training.num_threads * config.training.ranks
        slots = trainer_slots(name, trainer_booking(config), threads)
        identity = TrainerIdentity(name, slots, sole=config.training.trainers == 1)
        super().__init__(
            settings, shards, registry, scheduler, start_worker, node_address(), identity
        )
        self._scorer = None if evaluator is None else Scorer(*evaluator, registry, scheduler)
        self._synthetic: SyntheticAnswers | None = None
        if name == TRAINER and (synthetic := synthetic_settings(config)) is not None:
            self._synthetic = SyntheticAnswers(
                synthetic, shards, registry, scheduler, _target_handle
            )
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return trainer_samples(self.status(), self.table())

    def status(self) -> TrainerStatus:
        """See Trainer; with the status of what makes synthetic records."""
        synthetic = None if self._synthetic is None else self._synthetic.status()
        return replace(super().status(), synthetic=synthetic)

    def offer(self, data: bytes) -> None:
        """See Scorer."""
        if self._scorer is not None:
            self._scorer.offer(data)

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """See Scorer."""
        return 0 if self._scorer is None else self._scorer.delete(request_id, topic)

    def table(self) -> ScorerTable | None:
        """See Scorer; None without one."""
        return None if self._scorer is None else self._scorer.table()


def trainer_gpus(config: PacelineConfig) -> float:
    """Part of a GPU that a trainer takes from the target, 0 without a GPU."""
    if not config.training.enabled:
        return 0.0
    default = _TRAINER_GPU_SHARE if _has_gpu(config) else 0.0
    return config.placement.trainer.get("GPU", default)


def rank_options(config: PacelineConfig) -> dict[str, Any]:
    """Ray's options of a trainer's further rank: its own, but a whole GPU, as NCCL wants."""
    whole = 1.0 if trainer_gpus(config) else 0.0
    return actor_options(config.placement.trainer | {"GPU": whole})


def _has_gpu(config: PacelineConfig) -> bool:
    if "GPU" in config.placement.trainer:
        return config.placement.trainer["GPU"] > 0
    return ray.cluster_resources().get("GPU", 0) > 0 and config.target.device != "cpu"


def load_evaluator(
    config: PacelineConfig,
) -> "tuple[ScorerSettings, ExpertEvaluator] | None":
    """Load what the scorer runs; imports torch.

    None if experts are not evaluated or the drafts cannot be loaded: training goes on.
    """
    if not evaluates_experts(config):
        return None
    from paceline.actors.training.expert_evaluation import ExpertEvaluator

    try:
        settings = scorer_settings(config)
        return settings, ExpertEvaluator(settings)
    except Exception:
        logger.warning("experts are not evaluated, topics go to their own", exc_info=True)
        return None


def _target_handle() -> TargetHandle:
    """Handle of the target's deployment; raises before it is deployed."""
    from ray import serve

    from paceline.deploy.app import APPLICATION  # it imports this module

    handle: TargetHandle = serve.get_deployment_handle("target", APPLICATION)
    return handle
