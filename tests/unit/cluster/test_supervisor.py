"""Pending replicas by Ray and Serve, and the supervisor of trainers with a scripted scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import supervisor as module
from paceline.cluster.pending_replicas import PendingReplicas, count_starting, demands_of_serve
from paceline.cluster.scheduler.leases import Action, Instruction, ReplicaDemand
from paceline.cluster.supervisor import SupervisedActors, SupervisorStatus, TrainerSupervisor

OWN = {"GPU": 0.25}
REPLICA = {"GPU": 0.5, "CPU": 1.0}


@pytest.mark.parametrize(
    ("waiting", "replicas", "own_waiting", "expected"),
    [
        ([(REPLICA, 2)], 2, 0, [(REPLICA, 2)]),
        ([(REPLICA, 2)], 1, 0, [(REPLICA, 1)]),  # no more than Serve starts
        ([(REPLICA, 1)], 0, 0, []),  # somebody else's
        ([(OWN, 1)], 1, 1, []),  # a trainer that starts beside a replica that has its room
        ([(OWN, 2), (REPLICA, 1)], 3, 1, [(OWN, 1), (REPLICA, 1)]),
        ([], 3, 0, []),
    ],
)
def test_what_waits_is_serve_s_as_far_as_serve_starts_and_no_trainer_waits(
    waiting: list[Any], replicas: int, own_waiting: int, expected: list[Any]
) -> None:
    pending = [ReplicaDemand(amounts, count) for amounts, count in waiting]
    demands = [ReplicaDemand(amounts, count) for amounts, count in expected]
    assert demands_of_serve(pending, replicas, OWN, own_waiting) == demands


def test_starting_replicas_are_counted_over_all_applications() -> None:
    def application(**states: int) -> Any:
        return SimpleNamespace(deployments={"d": SimpleNamespace(replica_states=states)})

    status = SimpleNamespace(
        applications={"a": application(STARTING=2, RUNNING=1), "b": application(STARTING=1)}
    )
    assert count_starting(status) == 3


class Scheduler:
    """Answers with the instructions of a test, and records its calls."""

    def __init__(self) -> None:
        self.orders: list[Instruction] = []
        self.calls: list[Any] = []
        self.sync_trainers = SimpleNamespace(remote=self._sync)

    def _sync(self, held: Any, absent: Any, died: Any) -> Any:
        self.calls.append((held, absent, died))
        orders, self.orders = self.orders, []
        return orders


class Handle:
    """An actor that is never asked anything here."""

    ping = SimpleNamespace(remote=lambda: "asked")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What is killed; Ray's other calls give what they are given."""
    found: list[tuple[Any, bool]] = []
    ray = SimpleNamespace(
        get=lambda value, timeout=None: value,  # noqa: ARG005
        wait=lambda refs, timeout: ([], refs),  # noqa: ARG005
        kill=lambda handle, no_restart: found.append((handle, no_restart)),
    )
    monkeypatch.setattr(module, "ray", ray)
    return found


def make(scheduler: Scheduler, made: list[str], held: dict[str, float] = OWN) -> TrainerSupervisor:
    def maker(name: str) -> Handle:
        made.append(name)
        return Handle()

    factories = {name: (lambda name=name: maker(name)) for name in ("a", "b")}
    return TrainerSupervisor(
        factories, held, scheduler, lambda _own, _waiting: PendingReplicas([], {})
    )


def test_instructions_are_carried_out(killed: list[tuple[Any, bool]]) -> None:
    scheduler, made = Scheduler(), list[str]()
    supervisor = make(scheduler, made)
    supervisor._tick()
    assert made == ["a", "b"]
    assert scheduler.calls[-1] == ({"a": OWN, "b": OWN}, [], [])
    a = supervisor.handles()["a"]
    scheduler.orders = [Instruction(Action.KILL, "a")]
    supervisor._tick()
    assert killed == [(a, False)]
    supervisor._tick()
    assert scheduler.calls[-1] == ({"a": OWN, "b": OWN}, [], ["a"])
    scheduler.orders = [Instruction(Action.PREEMPT, "a")]
    supervisor._tick()
    assert killed == [(a, False), (a, True)]
    supervisor._tick()
    assert (made, list(supervisor.handles())) == (["a", "b"], ["b"])  # it is not made meanwhile
    assert scheduler.calls[-1] == ({"a": OWN, "b": OWN}, ["a"], [])
    scheduler.orders = [Instruction(Action.START, "a")]
    supervisor._tick()
    assert made == ["a", "b", "a"]
    supervisor._tick()
    assert scheduler.calls[-1][1] == []
    assert supervisor.status() == SupervisorStatus({"a": 2, "b": 1})


def test_an_actor_that_stops_answering_is_killed_once(
    monkeypatch: pytest.MonkeyPatch, killed: list[tuple[Any, bool]]
) -> None:
    answered, now = True, 0.0
    monkeypatch.setattr(module.ray, "wait", lambda refs, **_: (refs if answered else [], refs))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    actors = SupervisedActors[Any]({"a": Handle})

    def poll(count: int, seconds: float = module._TICK_S) -> None:
        nonlocal now
        for _ in range(count):
            now += seconds
            assert actors.poll() == []

    answered = False
    actors.start_missing()
    poll(2 * module._HANG_POLLS)  # its constructor takes long
    assert killed == []
    answered = True
    poll(1)
    assert actors.silent() == 0
    answered = False
    poll(8)  # the next call
    poll(1, seconds=3600.0)  # the host slept
    assert killed == []
    poll(module._HANG_POLLS)
    assert [(handle, no_restart) for handle, no_restart in killed] == [
        (actors.handles()["a"], False)
    ]
    assert actors.silent() == 1
    assert actors.death == "a: no answer for 120 s"
    poll(2 * module._HANG_POLLS)  # Ray restarts it
    assert len(killed) == 1


@pytest.mark.usefixtures("killed")
def test_a_kill_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*_: Any, **__: Any) -> None:
        tried.append(actors.silent())
        raise RuntimeError("the control store is away")

    monkeypatch.setattr(module.ray, "kill", fail)
    monkeypatch.setattr(module.ray, "wait", lambda refs, **_: (refs, []))
    actors = SupervisedActors[Any]({"a": Handle})
    actors.start_missing()
    for _ in range(2):
        actors.poll()
    assert actors.silent() == 0
    monkeypatch.setattr(module.ray, "wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(module, "_PING_S", 0.0)
    for _ in range(2 * module._HANG_POLLS + 1):
        assert actors.poll() == []
    assert len(tried) == 2


@pytest.mark.usefixtures("killed")
def test_the_scheduler_is_told_what_was_carried_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    supervisor = make(scheduler, [])
    supervisor._tick()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("away")

    with monkeypatch.context() as broken:
        broken.setattr(module.ray, "kill", fail)
        scheduler.orders = [Instruction(Action.KILL, "a"), Instruction(Action.PREEMPT, "b")]
        supervisor._tick()
    supervisor._tick()
    assert scheduler.calls[-1][1:] == ([], [])
    assert list(supervisor.handles()) == ["a", "b"]
    scheduler.orders = [Instruction(Action.KILL, "a"), Instruction(Action.PREEMPT, "b")]
    supervisor._tick()
    with monkeypatch.context() as broken:
        broken.setattr(module.ray, "get", fail)
        with pytest.raises(RuntimeError, match="away"):
            supervisor._tick()
    supervisor._tick()
    assert scheduler.calls[-1][1:] == (["b"], ["a"])
    supervisor._tick()
    assert scheduler.calls[-1][1:] == (["b"], [])


@pytest.mark.usefixtures("killed")
def test_a_failed_start_is_named_and_the_other_trainer_runs() -> None:
    scheduler, made = Scheduler(), list[str]()
    supervisor = make(scheduler, made)

    def refuse() -> Any:
        raise ValueError("the name is taken")

    factories = supervisor._trainers._factories
    supervisor._trainers._factories = {"a": refuse, "b": factories["b"]}
    supervisor._tick()
    assert made == ["b"]
    assert supervisor.status().last_error == "a: ValueError: the name is taken"
