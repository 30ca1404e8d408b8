"""Waiting replicas by Ray and Serve, and the keeper of trainers against a written board."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import trainer_supervisor as module
from paceline.cluster.pending_replicas import Rooms, of_serve, starting
from paceline.cluster.scheduler.leases import Action, Instruction, ReplicaDemand
from paceline.cluster.trainer_supervisor import TrainerKeeper

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
    demands = [ReplicaDemand(amounts, count) for amounts, count in expected]
    assert of_serve(waiting, replicas, OWN, own_waiting) == demands


def test_starting_replicas_are_counted_over_all_applications() -> None:
    def application(**states: int) -> Any:
        return SimpleNamespace(deployments={"d": SimpleNamespace(replica_states=states)})

    status = SimpleNamespace(
        applications={"a": application(STARTING=2, RUNNING=1), "b": application(STARTING=1)}
    )
    assert starting(status) == 3


class Board:
    """Answers with what a test has written down, and remembers what it was told."""

    def __init__(self) -> None:
        self.orders: list[Instruction] = []
        self.told: list[Any] = []
        self.sync_trainers = SimpleNamespace(remote=self._sync)

    def _sync(self, held: Any, absent: Any, died: Any) -> Any:
        self.told.append((held, absent, died))
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


def make(board: Board, made: list[str], held: dict[str, float] = OWN) -> TrainerKeeper:
    def maker(name: str) -> Handle:
        made.append(name)
        return Handle()

    makers = {name: (lambda name=name: maker(name)) for name in ("a", "b")}
    return TrainerKeeper(makers, held, board, lambda _own, _waiting: Rooms([], {}))


def test_orders_are_carried_out(killed: list[tuple[Any, bool]]) -> None:
    board, made = Board(), list[str]()
    keeper = make(board, made)
    keeper._turn()
    assert made == ["a", "b"]
    assert board.told[-1] == ({"a": OWN, "b": OWN}, [], [])
    a = keeper.handles()["a"]
    board.orders = [Instruction(Action.KILL, "a")]
    keeper._turn()
    assert killed == [(a, False)]
    board.orders = [Instruction(Action.PREEMPT, "a")]
    keeper._turn()
    assert killed == [(a, False), (a, True)]
    keeper._turn()
    assert (made, list(keeper.handles())) == (["a", "b"], ["b"])  # it is not made meanwhile
    assert board.told[-1] == ({"a": OWN, "b": OWN}, ["a"], [])
    board.orders = [Instruction(Action.START, "a")]
    keeper._turn()
    assert made == ["a", "b", "a"]
    keeper._turn()
    assert board.told[-1][1] == []
    assert keeper.describe() == {"made": {"a": 2, "b": 1}, "last_error": None}


@pytest.mark.usefixtures("killed")
def test_what_cannot_be_made_is_named_and_the_other_one_runs() -> None:
    board, made = Board(), list[str]()
    keeper = make(board, made)

    def refuse() -> Any:
        raise ValueError("the name is taken")

    keeper._makers = {"a": refuse, **{"b": keeper._makers["b"]}}
    keeper._turn()
    assert made == ["b"]
    assert keeper.describe()["last_error"] == "a: ValueError: the name is taken"
