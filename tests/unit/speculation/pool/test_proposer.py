"""The target's side of a round: deadlines, connections, measured costs."""

from __future__ import annotations

import socket

import pytest
from engines import DEVICE, request, run
from pools import make_proposer, pool_engine, serving

from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.costs import DraftCosts, DraftPrefill, StepCosts
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pool.connection import Connection, connect
from paceline.actors.speculation.pool.messages import Welcome
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.proposer import DraftRow

WELCOME = Welcome(1, {"a": 0, "a@0": 0})


def silent_connection() -> tuple[Connection, socket.socket]:
    """A connection, and the expert's end of it that sends nothing by itself."""
    ours, theirs = socket.socketpair()
    return Connection(ours), theirs


def row(name: str, draft: str) -> DraftRow:
    return DraftRow(name, draft, (1, 17, 33), 0, 4, SamplingParams(max_tokens=9, temperature=0.0))


def test_a_round_ends_in_time_although_bytes_keep_coming() -> None:
    """One byte per reading of the clock, of a frame that never ends."""
    connection, expert = silent_connection()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        expert.send(b"\0")
        return now

    expert.send((5000).to_bytes(4, "little"))
    proposer = PoolProposer(["a"], device=DEVICE, vocab_size=300, round_timeout_s=0.1, clock=clock)
    proposer.attach("a", connection, WELCOME)
    with expert:
        assert proposer.propose([row("r", "a")]).num_drafted.tolist() == [0]
        facts = proposer.stats()["a"]
        assert (facts["silent"], facts["lost"], facts["circuit"]) == (1, 0, "open")
        assert now < 1.0
        connection.close()


def test_replaced_connections_are_closed_without_rounds() -> None:
    proposer = make_proposer(("a", "b"))
    connections, ends = zip(*(silent_connection() for _ in range(4)), strict=True)
    for connection in connections[:3]:
        proposer.attach("a", connection, WELCOME)
    proposer.attach("b", connections[3], WELCOME)
    assert [item.fileno() >= 0 for item in connections] == [False, False, True, True]
    proposer.propose([])
    assert proposer._clients["a"].connection is connections[2]
    assert proposer._clients["b"].connection is connections[3]
    for closing in (*connections, *ends):
        closing.close()


NO_PREFILL = DraftPrefill()


class NotedCosts(DraftCosts):
    """Records its observations instead of learning from them: drafting always looks cheap."""

    def __init__(self) -> None:
        super().__init__({(1, 1): 1e-6, (2, 2): 1e-6, (1, 2): 1e-6, (2, 1): 1e-6})
        self.seen: list[tuple[int, int, int]] = []

    def observe(
        self,
        rows: int,
        experts: int,
        steps: int,
        seconds: float,  # noqa: ARG002
        prefilled: DraftPrefill = NO_PREFILL,  # noqa: ARG002
    ) -> None:
        if steps:
            self.seen.append((rows, experts, steps))


@pytest.mark.parametrize("silent", [False, True])
def test_a_round_with_a_timeout_is_no_observation_of_costs(
    silent: bool,
) -> None:
    with serving() as servers:
        proposer = make_proposer(timeout_s=10.0)
        proposer.attach("a", *connect(servers["a"].open_session("t"), 10.0))
        quiet, end = silent_connection()
        session = servers["b"].open_session("t")
        proposer.attach("b", *((quiet, WELCOME) if silent else connect(session, 10.0)))
        engine = pool_engine(proposer)
        costs = NotedCosts()
        engine.draft_runner._controller._policy = GoodputPolicy(StepCosts({(1, 1): 0.01}), costs, 4)  # type: ignore[attr-defined]
        if silent:
            proposer._timeout_s = 0.5
        asked = [
            request(f"r{i}", (1, 17, 33, 60), draft="ab"[i], max_tokens=8, ignore_eos=True)
            for i in range(2)
        ]
        outputs = run(engine, asked)
        assert all(out[-1].chunk.finish_reason == "length" for out in outputs.values())
        facts = proposer.stats()
        assert facts["a"]["answered"] > 1
        assert facts["b"]["silent"] == silent
        # The round that waited is not among them; the others are, one by one.
        assert len(costs.seen) == facts["a"]["answered"] - silent
        assert not proposer.timed_out
        end.close()
        quiet.close()
