"""Which replica gets a request, before and after one was lost."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.cluster import replica_choice as replicas
from paceline.cluster.replica_choice import ReplicaChoice


class Replica:
    """What Serve hands to a choice: answers, fails or keeps silent when it is asked."""

    def __init__(self, name: str, answer: str = "answers") -> None:
        self.name, self.answer, self.asked = name, answer, 0
        self.replica_id = ReplicaID(name, DeploymentID("target"))

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        if self.answer == "silent":
            await asyncio.sleep(60 * deadline_s)
        if self.answer == "fails":
            raise ActorUnavailableError("gone", b"\0" * 16)
        return 0


def pending(attempt: int, failed_on: tuple[str, ...] = ()) -> Any:
    sampling = SamplingParams(max_tokens=1)
    request = GenerationRequest("r", (1,), sampling, attempt=attempt, failed_on=failed_on)
    return SimpleNamespace(args=[request, False], kwargs={})


def choose(
    choice: ReplicaChoice, candidates: list[Replica], attempt: int, *failed_on: str
) -> list[list[str]]:
    asked = pending(attempt, failed_on)
    ranks = asyncio.run(choice.choose_replicas(candidates, asked))  # type: ignore[arg-type]
    return [[replica.name for replica in rank] for rank in ranks]


@pytest.fixture
def choice() -> ReplicaChoice:
    made = ReplicaChoice.__new__(ReplicaChoice)  # Serve's own part needs a running Serve
    made.initialize_state()
    return made


def test_without_failures_no_replica_is_probed_and_each_comes_first_in_turn(
    choice: ReplicaChoice,
) -> None:
    every = [Replica("a"), Replica("b")]
    seen = [choose(choice, every, attempt=0) for _ in range(4)]
    assert [len(ranks) for ranks in seen] == [1] * 4
    assert [ranks[0][0] for ranks in seen] in (["a", "b"] * 2, ["b", "a"] * 2)
    assert all(sorted(ranks[0]) == ["a", "b"] for ranks in seen)
    assert [replica.asked for replica in every] == [0, 0]


@pytest.mark.parametrize("answer", ["silent", "fails"])
def test_after_a_loss_those_that_answer_come_first_also_for_new_requests(
    choice: ReplicaChoice, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(replicas, "_PROBE_TIMEOUT_S", 0.05)
    every = [Replica("bad", answer), Replica("good")]
    for attempt in (1, 0, 0):
        assert choose(choice, every, attempt) == [["good"], ["bad"]]
    assert [replica.asked for replica in every] == [1, 3]
    choice._silent_until.clear()  # some seconds later
    assert choose(choice, every, attempt=0) == [["good"], ["bad"]]
    assert every[0].asked == 2
    choice._probe_until = 0.0  # a minute later
    assert sorted(choose(choice, every, attempt=0)[0]) == ["bad", "good"]


def test_the_only_replica_is_taken_unasked(choice: ReplicaChoice) -> None:
    only = Replica("only", "silent")
    assert choose(choice, [only], attempt=3) == [["only"]]
    assert only.asked == 0


def test_a_replica_that_said_it_failed_is_the_last_of_the_living(
    choice: ReplicaChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_PROBE_TIMEOUT_S", 0.05)
    every = [Replica("a"), Replica("b"), Replica("c"), Replica("dead", "fails")]
    assert choose(choice, every, 2, "b", "a") == [["c"], ["b"], ["a"], ["dead"]]
    assert choose(choice, every[:2], 1, "a", "gone") == [["b"], ["a"], []]
    others = choose(choice, every[:3], 0)  # it is this request's alone
    assert [sorted(rank) for rank in others] == [["a", "b", "c"], []]


def test_a_question_that_got_no_answer_has_the_replicas_asked(choice: ReplicaChoice) -> None:
    every = [Replica("bad", "fails"), Replica("good")]
    question = SimpleNamespace(args=[], kwargs={"attempt": 1})
    ranks = asyncio.run(choice.choose_replicas(every, question))  # type: ignore[arg-type]
    assert [[replica.name for replica in rank] for rank in ranks] == [["good"], ["bad"]]


def test_the_choices_of_one_client_request_all_get_a_replica(choice: ReplicaChoice) -> None:
    """They share the request id, the only key of Serve's plain router."""

    async def give() -> list[bool]:
        one = RequestMetadata("one", "one", call_method="generate")
        first, second = (PendingRequest([], {}, one) for _ in range(2))
        # What Serve's own constructor, which needs a running Serve, leaves there.
        choice._pending_requests_to_fulfill = deque([first, second])
        choice._pending_requests_by_id = {"one": second}
        choice._routing_task_by_pending_request_future = {}
        choice.queue_wait_time_ms_histogram = SimpleNamespace(observe=lambda _: None)
        for name in ("good", "better"):
            choice._fulfill_next_pending_request(Replica(name), one)
        return [first.future.done(), second.future.done()]

    assert asyncio.run(give()) == [True, True]
