"""The learning actors: shard hosts, registry, trainer scheduler and trainers, by name and handle.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from paceline.actors.cores import available_cores
from paceline.actors.priority import lower_process_priority
from paceline.actors.replay.host import ShardHostHandle, shard_of
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.training.permits import ResourceSlot
from paceline.actors.training.scorer import ScorerHandle
from paceline.actors.training.trainer import TrainerHandle
from paceline.actors.weights.subscriber import RegistryHandle
from paceline.cluster.named_actor import NamedActor
from paceline.cluster.scheduler.leases import Amounts
from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle
from paceline.cluster.session import NAMESPACE
from paceline.cluster.supervisor import SupervisorHandle

REGISTRY, SCHEDULER = "paceline-registry", "paceline-scheduler"
SHARDS, TRAINER = "paceline-shards", "paceline-trainer"


def numbered(name: str, count: int) -> list[str]:
    """Names of so many actors of a kind."""
    return [name, *(f"{name}-{number}" for number in range(2, count + 1))][:count]


@dataclass(frozen=True, slots=True)
class LearningActors:
    """Handles of the learning actors; any may be dead.

    Attributes:
        shards: topic to replay shard.
        registry: weight registry.
        scheduler: trainer scheduler.
        trainer: the first trainer; None if training is off.
        scorer: evaluates experts, in the trainer's process; None if nothing does.
        supervisor: Serve handle of the supervisor, on a cluster; else None.
        further_trainers: by name.
        shard_hosts: the actors that hold the shards, in their order.
    """

    shards: Mapping[str, ShardHandle]
    registry: RegistryHandle
    scheduler: TrainerSchedulerHandle
    trainer: TrainerHandle | None
    scorer: ScorerHandle | None = None
    supervisor: SupervisorHandle | None = None
    further_trainers: Mapping[str, TrainerHandle] = field(default_factory=dict)
    shard_hosts: Sequence[ShardHostHandle] = ()

    @classmethod
    def find(
        cls,
        topics: Iterable[str],
        trainers: Sequence[str],
        *,
        shard_hosts: int,
        scores: bool,
        handle: Callable[[str], Any] = NamedActor,
    ) -> "LearningActors":
        """Gather handles by name.

        Args:
            topics: of the shards.
            trainers: names; a trainer that was preempted comes back as another actor, so they are
                NamedActor in any case.
            shard_hosts: number of actors that hold the shards.
            scores: whether the first trainer's process evaluates experts.
            handle: name to handle of the other actors.
        """
        named: dict[str, Any] = {name: NamedActor(name) for name in trainers}
        trainer = named.pop(TRAINER, None)
        hosts: list[Any] = [handle(name) for name in numbered(SHARDS, shard_hosts)]
        return cls(
            shards={topic: shard_of(topic, hosts) for topic in topics},
            registry=handle(REGISTRY),
            scheduler=handle(SCHEDULER),
            trainer=trainer,
            scorer=trainer if scores else None,
            further_trainers=named,
            shard_hosts=hosts,
        )

    def required(self) -> dict[str, Any]:
        """All but the trainers, by a name for messages."""
        names = numbered("host of replay shards", len(self.shard_hosts))
        hosts = dict(zip(names, self.shard_hosts, strict=True))
        return hosts | {"weight registry": self.registry, "trainer scheduler": self.scheduler}

    def stop(self) -> None:
        """End all but the trainers for good."""
        for actor in reversed(self.required().values()):
            ray.kill(actor, no_restart=True)


def restarted_actor(cls: type, name: str, options: Mapping[str, Any]) -> Any:
    """The class as a named actor that Ray restarts for ever; calls are never repeated.

    Once it is constructed, its process gives way to those that serve.
    """

    class GivesWay(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            lower_process_priority()

    GivesWay.__name__ = GivesWay.__qualname__ = cls.__name__  # which Ray's titles show
    actor = ray.remote(**options, max_restarts=-1, max_task_retries=0)(GivesWay)
    return actor.options(name=name, namespace=NAMESPACE)


def trainer_slots(name: str, booked: Amounts, num_threads: int) -> tuple[ResourceSlot, ...]:
    """Slots on this node that a trainer may compute on.

    Args:
        name: of the trainer.
        booked: what Ray books for it: then it has a slot of its own. Else the trainers of a node
            share slots of ``num_threads`` cores.
        num_threads: of a trainer, all its ranks together.
    """
    node = str(ray.get_runtime_context().get_node_id())
    if booked:
        return (ResourceSlot(name, node, booked),)
    count = max(1, available_cores() // num_threads)
    return tuple(ResourceSlot(f"{node}/{number}", node) for number in range(count))
