"""The guards of the ingress: the time box around the router, and the limiter."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.actors.router.policy import Route
from paceline.cluster.learning_actors import LearningActors
from paceline.deploy.api.actor_calls import FailedCall
from paceline.deploy.api.admission import ConcurrencyLimiter
from paceline.deploy.api.prompt_encoder import last_user_message
from paceline.deploy.api.request_schemas import ChatCompletionRequest
from paceline.deploy.api.routing import RouterCircuitBreaker, RouteSelector
from paceline.deploy.api.status import gather_status
from paceline.deploy.errors import ApiError

GENERAL = Route("general", "general")


class Remote:
    """A handle whose methods run a coroutine function: the shape of Serve's and Ray's."""

    def __init__(self, **methods: Callable[..., Awaitable[Any]]) -> None:
        for name, method in methods.items():
            setattr(self, name, _Method(method))


class _Method:
    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


def finder(classify: Callable[..., Awaitable[Any]], now: list[float]) -> RouteSelector:
    return RouteSelector(
        Remote(classify=classify), ("general", "sql"), 0.05, 0.5, clock=lambda: now[0]
    )


async def sure(_text: str) -> dict[str, float]:
    return {"sql": 0.9, "general": 0.1}


async def unsure(_text: str) -> dict[str, float]:
    return {"sql": 0.4, "general": 0.3, "math": 0.3}


async def late(_text: str) -> dict[str, float]:
    await asyncio.sleep(10)
    return {"sql": 1.0}


async def broken(_text: str) -> dict[str, float]:
    raise RuntimeError("dead")


@pytest.mark.parametrize(
    ("classify", "topic"),
    [(sure, "sql"), (unsure, "general"), (late, "general"), (broken, "general")],
)
def test_a_router_in_doubt_late_or_dead_means_general(classify: Any, topic: str) -> None:
    assert asyncio.run(finder(classify, [0.0]).select("SELECT")) == Route(topic, topic)


def test_without_a_router_everything_is_general() -> None:
    none = RouteSelector(None, ("general", "sql"), 0.05, 0.5, clock=lambda: 0.0)
    assert asyncio.run(none.select("SELECT")) == GENERAL


def test_a_router_that_cancels_a_call_fails_no_request_and_a_client_that_leaves_is_heard() -> None:
    waiting = asyncio.Event()

    async def cancels(_text: str) -> dict[str, float]:
        if not waiting.is_set():  # what Serve makes of a call that the replica has cancelled
            raise asyncio.CancelledError
        await asyncio.sleep(10)
        return {}

    async def run() -> None:
        selector = finder(cancels, [0.0])
        assert await selector.select("SELECT") == GENERAL
        assert selector.calls["failed"] == 1
        waiting.set()
        asked = asyncio.create_task(finder(cancels, [0.0]).select("SELECT"))
        await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(run())


def test_a_router_that_fails_is_left_alone_for_a_moment() -> None:
    asked = []

    async def failing(text: str) -> dict[str, float]:
        asked.append(text)
        if len(asked) <= 2:
            raise RuntimeError("dead")
        return {"sql": 1.0}

    now = [0.0]
    selector = finder(failing, now)

    async def find() -> str:
        return (await selector.select("SELECT")).topic

    for _ in range(5):
        assert asyncio.run(find()) == "general"
    assert len(asked) == 1
    now[0] = 0.6
    assert asyncio.run(find()) == "general"
    now[0] = 1.2  # the back-off has doubled
    assert asyncio.run(find()) == "general"
    assert len(asked) == 2
    now[0] = 1.7
    assert [asyncio.run(find()) for _ in range(3)] == ["sql"] * 3


def test_a_hung_router_costs_one_time_box_per_back_off_and_the_rest_nothing() -> None:
    """A hundred requests in a row, ten seconds of the router's silence: the clock is ours."""
    now, boxes = [0.0], []

    async def silent(_text: str) -> dict[str, float]:
        boxes.append(now[0])
        await asyncio.sleep(10)
        return {}

    selector = finder(silent, now)

    async def hundred() -> None:
        for _ in range(100):
            assert await selector.select("SELECT") == GENERAL
            now[0] += 0.1

    asyncio.run(hundred())
    gaps = [later - earlier for earlier, later in itertools.pairwise(boxes)]
    assert 4 <= len(boxes) <= 5  # at 0 s, and after 0.5, 1, 2 and 4 s more
    assert all(later >= 1.7 * earlier for earlier, later in itertools.pairwise(gaps))


def test_requests_that_ask_together_open_the_circuit_once_and_one_alone_tries_again() -> None:
    circuit = RouterCircuitBreaker(initial_backoff_s=1.0, max_backoff_s=4.0)
    assert all(circuit.allow(now) for now in (0.0, 0.1, 0.2))
    for now in (0.0, 0.1, 0.2):
        circuit.record_failure(called_at=now, now=now + 5.0)
    assert not circuit.allow(5.9)
    assert circuit.allow(6.1)
    assert not circuit.allow(6.1)
    circuit.record_cancelled()
    assert circuit.allow(6.2)
    waits = []
    for _ in range(4):
        circuit.record_failure(called_at=100.0, now=100.0)
        waits.append(next(w for w in range(1, 99) if circuit.allow(100.0 + w)))
    assert waits == [2, 4, 4, 4]
    circuit.record_success()
    assert circuit.allow(0.0)
    assert circuit.allow(0.0)


def test_slots_refuse_what_is_too_much_and_are_released_once() -> None:
    limiter = ConcurrencyLimiter(3)
    release = limiter.acquire(2)
    with pytest.raises(ApiError) as caught:
        limiter.acquire(2)
    assert caught.value.status == 503
    assert caught.value.headers() == {"Retry-After": "1"}
    release()
    release()
    limiter.acquire(3)
    with pytest.raises(ApiError) as never:
        limiter.acquire(4)
    assert (never.value.status, never.value.param) == (400, "prompt")


def test_one_client_cannot_take_all_slots() -> None:
    limiter = ConcurrencyLimiter(9, per_client=3)
    release = limiter.acquire(3, "a")
    with pytest.raises(ApiError) as caught:
        limiter.acquire(1, "a")
    assert (caught.value.status, caught.value.type) == (429, "rate_limit_error")
    assert (caught.value.code, caught.value.headers()) == (
        "rate_limit_exceeded",
        {"Retry-After": "1"},
    )
    limiter.acquire(3, "b")
    release()
    limiter.acquire(2, "a")
    with pytest.raises(ApiError) as never:
        limiter.acquire(4, "c", "n")
    assert (never.value.status, never.value.param) == (400, "n")
    limiter.acquire(2, "c")
    with pytest.raises(ApiError) as full:
        limiter.acquire(3, "d")
    assert full.value.status == 503


def test_the_status_survives_a_dead_part() -> None:
    async def load() -> dict[str, Any]:
        return {"running": 0}

    async def current() -> dict[str, int]:
        return {"sql": 3}

    async def history() -> list[dict[str, Any]]:
        return [{"topic": "sql"}] * 100

    async def live() -> dict[str, dict[str, int]]:
        return {"sql": {"requests": 4}}

    async def dead() -> Any:
        raise ConnectionError("gone")

    actors = LearningActors(
        shards={"sql": Remote(stats=dead)},
        registry=Remote(stable_versions=current, history=history, topic_status=live),
        scheduler=Remote(status=dead),
        trainer=Remote(status=dead),
    )
    status = asyncio.run(gather_status(Remote(status=load), actors))
    assert status.target == {"running": 0}
    assert status.weight_versions == {"sql": 3}
    assert status.live_drafts == {"sql": {"requests": 4}}
    assert len(status.decisions) == 60
    assert status.trainer == status.scheduler == FailedCall("ConnectionError")
    assert status.shards == {"sql": FailedCall("ConnectionError")}
    assert status.routing is None


def test_a_conversation_is_classified_by_the_last_user_message() -> None:
    def chat(*messages: tuple[str, str]) -> ChatCompletionRequest:
        return ChatCompletionRequest(
            model="m", messages=[{"role": role, "content": text} for role, text in messages]
        )

    assert last_user_message(chat(("user", "a"), ("assistant", "b"), ("user", "c")).messages) == "c"
    assert (
        last_user_message(chat(("system", "s"), ("user", "a"), ("assistant", "b")).messages) == "a"
    )
    assert last_user_message(chat(("system", "s")).messages) == "s"
