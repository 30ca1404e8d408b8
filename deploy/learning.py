"""Start and end the actors that learn: shards, registry, scheduler, trainers.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util import metrics

from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.background import lower_priority
from paceline.actors.training.permits import ResourceSlot, TrainerIdentity
from paceline.actors.training.scorer import Scorer
from paceline.actors.training.synthetic.generator import SyntheticPrompts
from paceline.actors.training.trainer import Trainer
from paceline.actors.weights.state_folder import fingerprints
from paceline.cluster.named_actor import NamedActor
from paceline.cluster.placement import actor_options, booked
from paceline.cluster.rank_actors import node_address, worker_starter
from paceline.cluster.scheduler.leases import SchedulerSettings
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.cluster.session import NAMESPACE
from paceline.cluster.supervisor import ActorFactory
from paceline.deploy.api.status import LearningActors
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig, default_threads
from paceline.deploy.config.dynamic_topics import with_added
from paceline.deploy.errors import cause_of
from paceline.deploy.monitoring.exporter import Exporter, RaySink, Sample, metered
from paceline.deploy.monitoring.readings import (
    registry_samples,
    scheduler_samples,
    shard_samples,
    trainer_samples,
)
from paceline.deploy.scoring import make_evaluator, scores_experts
from paceline.deploy.synthetic import synthetic_settings_of, target_handle

if TYPE_CHECKING:
    from paceline.actors.training.settings import TrainerSettings

_LIGHT_LOAD, _CORES_FOR_THE_REST = 0.25, 1
_REGISTRY, _SCHEDULER, _TRAINER = "paceline-registry", "paceline-scheduler", "paceline-trainer"
_TRAINER_GPU_SHARE = 0.25
_YIELD_S, _YIELD_ON_CPU_S = 2.0, 60.0
_MEBIBYTE = 2**20
_HOUR_S = 3600.0


def start_actors(config: PacelineConfig) -> LearningActors:
    """Start all but the trainers under their names; Ray restarts those that die."""
    actors = {name: start() for name, start in factories(config).items()}
    return _gathered(config, actors.__getitem__)


def named_actors(config: PacelineConfig) -> LearningActors:
    """The same actors by their names, for processes that have not started them."""
    return _gathered(config, NamedActor)


def factories(config: PacelineConfig) -> dict[str, ActorFactory]:
    """Name to factory, of all actors but the trainers, which need them all."""
    found: dict[str, ActorFactory] = {
        _shard_name(expert): partial(start_shard, config, expert)
        for expert in config.drafts.experts
    }
    return found | {_REGISTRY: partial(_registry, config), _SCHEDULER: partial(_scheduler, config)}


def trainer_names(config: PacelineConfig) -> list[str]:
    """Names of the trainers' actors; none if training is disabled."""
    if not config.training.enabled:
        return []
    further = range(2, config.training.trainers + 1)
    return [_TRAINER, *(f"{_TRAINER}-{number}" for number in further)]


def trainer_factories(config: PacelineConfig) -> dict[str, ActorFactory]:
    """Trainer to factory."""
    return {name: partial(_trainer, config, name) for name in trainer_names(config)}


def trainer_booking(config: PacelineConfig) -> dict[str, float]:
    """What Ray books for each trainer."""
    return booked(_trainer_options(config))


def _gathered(config: PacelineConfig, actor: Callable[[str], Any]) -> LearningActors:
    # By their names: a trainer that has made room for a replica comes back as another actor.
    trainers = {name: NamedActor(name) for name in trainer_names(config)}
    trainer = trainers.pop(_TRAINER, None)
    return LearningActors(
        shards={expert: actor(_shard_name(expert)) for expert in config.drafts.experts},
        registry=actor(_REGISTRY),
        scheduler=actor(_SCHEDULER),
        trainer=trainer,
        scorer=trainer if scores_experts(config) else None,
        further_trainers=trainers,
    )


def occupied_above(config: PacelineConfig, cores: int) -> int:
    """Requests per replica beside which training may run: by default none without cores to spare.

    Args:
        config: see PacelineConfig.
        cores: of this machine; they do not matter to a trainer on a host of its own.
    """
    share = config.training.max_occupancy
    if share == "auto":
        share = _LIGHT_LOAD if _has_cores_to_spare(config, cores) else 0.0
    return int(share * config.target.max_num_seqs)


def _has_cores_to_spare(config: PacelineConfig, cores: int) -> bool:
    """Whether training takes nothing from serving, nor from front door, router and Ray."""
    if config.placement.trainer_is_apart:
        return True
    threads = config.target.num_threads or default_threads(cores)
    serving = threads * config.target.most_replicas
    serving += config.drafts.pool_processes * config.drafts.num_threads
    shares_gpu = config.target.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    training = config.training.num_threads * config.training.ranks * config.training.trainers
    return not shares_gpu and serving + training + _CORES_FOR_THE_REST <= cores


def wait_for(actors: LearningActors, seconds: float) -> None:
    """Return when shards, registry and scheduler answer; trainers may take their time.

    Raises:
        RuntimeError: names the one that did not come up within ``seconds``, and why.
    """
    needed = {f"replay shard {expert}": shard for expert, shard in actors.shards.items()}
    needed |= {"weight registry": actors.registry, "trainer scheduler": actors.scheduler}
    answers = {name: actor.ping.remote() for name, actor in needed.items()}
    deadline = time.monotonic() + seconds
    for name, answer in answers.items():
        try:
            ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except RayError as error:
            raise RuntimeError(f"the {name} does not come up: {cause_of(error)}") from error


def stop_actors(actors: LearningActors) -> None:
    """End all but the trainers for good; Ray must not bring them back."""
    for actor in (actors.scheduler, actors.registry, *actors.shards.values()):
        ray.kill(actor, no_restart=True)


def _named(cls: type, name: str, options: Mapping[str, Any]) -> Any:
    """The class as an actor that is restarted for ever and whose calls are never repeated."""
    actor = ray.remote(**options, max_restarts=-1, max_task_retries=0)(cls)
    return actor.options(name=name, namespace=NAMESPACE)


def _shard_name(expert: str) -> str:
    return "paceline-shard-" + expert


def replay_settings(config: PacelineConfig) -> ReplaySettings:
    """The part of the config that a shard works by."""
    return ReplaySettings(
        capacity_bytes=config.replay.capacity_mb * _MEBIBYTE,
        retention_s=config.replay.retention_hours * _HOUR_S,
        remover=config.replay.remover,
        sampler=config.replay.sampler,
        held_out_fraction=config.replay.held_out_fraction,
        synthetic_per_record=config.training.synthetic_per_record,
    )


def start_shard(config: PacelineConfig, expert: str) -> Any:
    """Start a topic's replay shard; returns its actor handle.

    Args:
        config: see PacelineConfig.
        expert: the topic.
    """
    folder = str(config.state_path / "replay") if config.replay.persist else None
    metered_shard = metered(ReplayShard, lambda shard: shard_samples(shard.stats()))
    shard = _named(metered_shard, _shard_name(expert), actor_options(config.placement.learning))
    return shard.remote(expert, replay_settings(config), folder)


def _scheduler(config: PacelineConfig) -> Any:
    metered_scheduler = metered(
        TrainerScheduler, lambda s: scheduler_samples(s.snapshot(), s.pop_yield_times())
    )
    scheduler = _named(metered_scheduler, _SCHEDULER, actor_options(config.placement.learning))
    occupied = occupied_above(config, os.cpu_count() or 1)
    reckoned = _YIELD_S if _has_gpu(config) else _YIELD_ON_CPU_S
    settings = SchedulerSettings(yield_timeout_s=config.training.yield_timeout_s or reckoned)
    return scheduler.remote(
        config.training.idle_after_s, occupied_above=occupied, settings=settings
    )


def _registry(config: PacelineConfig) -> Any:
    from paceline.actors.weights.canary import CanarySettings
    from paceline.actors.weights.registry import WeightRegistry  # imports torch

    metered_registry = metered(WeightRegistry, lambda r: registry_samples(r.metrics()))
    registry = _named(metered_registry, _REGISTRY, actor_options(config.placement.learning))
    return registry.remote(
        directory=str(config.state_path / WEIGHTS_FOLDER),
        topics=config.drafts.experts,
        fingerprint=fingerprints(config.target_path, config.draft_paths),
        keep_versions=config.training.keep_versions,
        canary=CanarySettings() if config.training.effective_canary_share else None,
        initial={expert: str(path) for expert, path in config.draft_paths.items()},
    )


def _trainer(config: PacelineConfig, name: str) -> Any:
    return _named(TrainerActor, name, _trainer_options(config)).remote(config, name)


def _trainer_options(config: PacelineConfig) -> dict[str, Any]:
    return actor_options(config.placement.trainer, trainer_gpus(config))


def _slots(config: PacelineConfig, name: str) -> tuple[ResourceSlot, ...]:
    """What a trainer on this node may compute on.

    Its own where Ray books something for it; else any of the node's cores, as many as it has
    threads, which the trainers of a node share.
    """
    node = str(ray.get_runtime_context().get_node_id())
    if amounts := trainer_booking(config):
        return (ResourceSlot(name, node, amounts),)
    each = config.training.num_threads * config.training.ranks
    count = max(1, (os.cpu_count() or 1) // each)
    return tuple(ResourceSlot(f"{node}/{number}", node) for number in range(count))


def trainer_settings(config: PacelineConfig) -> "TrainerSettings":
    """The part of the config that the trainer works by."""
    from paceline.actors.engine.model_loader import resolve_device  # imports torch
    from paceline.actors.training.gate import GateSettings
    from paceline.actors.training.settings import DistillerSettings, TrainerSettings
    from paceline.actors.training.topic_schedule import ScheduleSettings, min_hope_for

    micro_batch, accumulation = config.training.batches(resolve_device(config.target.device).type)
    return TrainerSettings(
        draft_paths={expert: str(path) for expert, path in config.draft_paths.items()},
        distiller=DistillerSettings(
            learning_rate=config.training.learning_rate,
            rate_hold_steps=config.training.rate_hold_steps,
            accumulation=accumulation,
            weight_decay=config.training.weight_decay,
            average_decay=config.training.average_decay,
            device=config.target.device,
            objective=config.training.objective,
            adapter=config.training.adapter,
            lora_rank=config.training.lora_rank,
            lora_alpha=config.training.lora_alpha,
            zero_stage=config.training.zero_stage,
        ),
        gate=GateSettings(min_gain=config.training.min_gain),
        schedule=ScheduleSettings(least_hope=min_hope_for(config.training.min_gain)),
        ranks=config.training.ranks,
        num_threads=config.training.num_threads,
        micro_batch=micro_batch,
        round_seconds=config.training.round_seconds,
        draft_top_k=config.drafts.top_k,
        report_losses="priority" in (config.replay.remover, config.replay.sampler),
        optimizer_dir=str(config.state_path / "optimizer"),
    )


class TrainerActor(Trainer):
    """A trainer; the first one also runs the scorer and makes synthetic prompts.

    It looks the others up by name whenever Ray starts it, and again now and then: handles among
    its arguments would be objects that a restart may not find, and Ray warns of it.
    """

    def __init__(self, config: PacelineConfig, name: str = _TRAINER) -> None:
        """See Trainer; ``name`` is the actor's."""
        shards = {name: NamedActor(_shard_name(name)) for name in config.drafts.experts}
        registry, scheduler = NamedActor(_REGISTRY), NamedActor(_SCHEDULER)
        for actor in (*shards.values(), registry, scheduler):
            actor.find()  # without them there is nothing to learn from or for
        config = with_added(config)  # since the first start; their shards are told of by others
        # Importing torch takes seconds of a core that the replicas, starting now too, need more.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with ThreadPoolExecutor(1, initializer=lower_priority) as beside:
            settings = beside.submit(trainer_settings, config).result()
            evaluator = beside.submit(make_evaluator, config).result() if name == _TRAINER else None
            synthetic = beside.submit(synthetic_settings_of, config, name == _TRAINER).result()
        start_worker = worker_starter(
            settings.num_threads, settings.group_timeout_s, float(_has_gpu(config))
        )
        identity = TrainerIdentity(name, _slots(config, name), sole=config.training.trainers == 1)
        super().__init__(
            settings, shards, registry, scheduler, start_worker, node_address(), identity
        )
        self._scorer = None if evaluator is None else Scorer(*evaluator, registry, scheduler)
        self._synthetic: SyntheticPrompts | None = None
        if synthetic is not None:
            self._synthetic = SyntheticPrompts(
                synthetic, shards, registry, scheduler, target_handle
            )
        self._exporter = Exporter(self._samples, RaySink(metrics)).start()

    def _samples(self) -> Iterable[Sample]:
        return trainer_samples(self.status(), self.drifts(), self.table())

    def status(self) -> dict[str, Any]:
        """See Trainer; with synthetic prompts, their counts as ``synthetic``."""
        found = super().status()
        return (
            found if self._synthetic is None else found | {"synthetic": self._synthetic.figures()}
        )

    def offer(self, data: bytes) -> None:
        """See Scorer."""
        if self._scorer is not None:
            self._scorer.offer(data)

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """See Scorer."""
        return 0 if self._scorer is None else self._scorer.delete(request_id, topic)

    def table(self) -> dict[str, Any]:
        """See Scorer."""
        return {} if self._scorer is None else self._scorer.table()


def trainer_gpus(config: PacelineConfig) -> float:
    """The part of a GPU that a trainer takes from the target, 0 where there is none."""
    if not config.training.enabled:
        return 0.0
    reckoned = _TRAINER_GPU_SHARE if _has_gpu(config) else 0.0
    return config.placement.trainer.get("GPU", reckoned)


def rank_gpus(config: PacelineConfig) -> int:
    """GPUs of the trainer's further ranks: one each where there are any."""
    return config.training.ranks - 1 if trainer_gpus(config) else 0


def _has_gpu(config: PacelineConfig) -> bool:
    if "GPU" in config.placement.trainer:
        return config.placement.trainer["GPU"] > 0
    return ray.cluster_resources().get("GPU", 0) > 0 and config.target.device != "cpu"
