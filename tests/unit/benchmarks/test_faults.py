"""What the clients of the benchmarks count, against a small server of raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from clients import Load, Reply, bodies
from faults import (
    FAULTS,
    POOL_FAULTS,
    QUICK,
    Fault,
    Figures,
    all_run,
    failures_of,
    figures_of,
    passes_of,
)
from soak import Mixed

Answer = Callable[["Scripted", asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BREAKS_AFTER_S, BACK_OFF_S = 0.3, 0.1


class Scripted:
    """A server that answers its first request by the first of ``answers``, and so on."""

    def __init__(self, *answers: Answer) -> None:
        self.asked = 0
        self.answers = answers
        self.server: asyncio.Server
        self.returning: asyncio.Task[None]
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def go_away(self, seconds: float) -> None:
        """Refuse connections for so long."""
        self.server.close()

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            await self.listen()

        self.returning = asyncio.create_task(come_back())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
        await reader.readexactly(int(length))
        self.asked += 1
        await self.answers[self.asked - 1](self, writer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


def send(writer: asyncio.StreamWriter, *events: Any) -> None:
    for event in events:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def piece(token: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"token_ids": [token], "delta": {"content": f"{token} "}, "finish_reason": finish}
    return {"choices": [choice]}


async def whole(_: Scripted, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    send(writer, piece(1), piece(2, "length"), "[DONE]")
    writer.write(b"0\r\n\r\n")


async def breaks(server: Scripted, writer: asyncio.StreamWriter) -> None:
    """One event, then silence, then the connection ends and nobody listens for a while."""
    writer.write(HEAD)
    send(writer, piece(1))
    await writer.drain()
    await asyncio.sleep(BREAKS_AFTER_S)
    server.go_away(2.5 * BACK_OFF_S)


async def refuses(_: Scripted, writer: asyncio.StreamWriter) -> None:
    body = b'{"error": {"message": "the target is gone"}}'
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)


async def stops_with_an_error(_: Scripted, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    send(writer, piece(1), {"error": {"message": "the engine failed"}}, "[DONE]")
    writer.write(b"0\r\n\r\n")


async def breaks_after_an_error(_: Scripted, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    send(writer, piece(1), {"error": {"message": "the engine failed"}})


async def ends_early(_: Scripted, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    send(writer, piece(1))
    writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def listening(*answers: Answer) -> AsyncIterator[Scripted]:
    server = Scripted(*answers)
    await server.listen()
    try:
        yield server
    finally:
        server.server.close()


async def asked(*answers: Answer) -> tuple[Scripted, Load, Reply]:
    async with listening(*answers) as server:
        load = Load(server.url, bodies(1, 2), 1, retry_s=20, back_off_s=BACK_OFF_S)
        (reply,) = await load.run()
    return server, load, reply


def figures(load: Load, reply: Reply, fault: Fault) -> Figures:
    quiet = Reply([1, 2], "1 2 ", "length")
    return figures_of(fault, [reply], load, 3.0, [quiet])


def test_a_pause_lasts_from_the_last_event_before_a_break_to_the_first_after_it() -> None:
    """Silence, the break, refused connections and back-off are one wait to who waits."""
    began = time.monotonic()
    server, load, reply = asyncio.run(asked(breaks, whole))
    took = time.monotonic() - began
    assert (server.asked, reply.error, reply.answer) == (2, None, ((1, 2), "1 2 ", "length"))
    assert load.broken >= 2, "no connection was refused"
    assert BREAKS_AFTER_S + 2 * BACK_OFF_S <= load.longest_pause_s <= took
    found = figures(load, reply, Fault(("ingress",)))
    assert (found.lost, found.changed, found.broken) == (0, 0, load.broken)
    assert failures_of(Fault(("ingress",)), found) == []
    (wrong,) = failures_of(Fault(("target",)), found)
    assert "broken, though the ingress lived" in wrong


@pytest.mark.parametrize(
    "answer", [refuses, stops_with_an_error, breaks_after_an_error, ends_early]
)
def test_what_the_server_answers_is_not_asked_for_again_and_counts_as_lost(answer: Answer) -> None:
    server, load, reply = asyncio.run(asked(answer, whole))
    assert reply.error is not None
    assert (server.asked, load.broken) == (1, 0)
    found = figures(load, reply, Fault(("target",)))
    assert (found.lost, found.changed, found.broken) == (1, 0, 0)
    assert failures_of(Fault(("target",)), found) == ["kill target: 1 lost"]


def test_a_fault_may_cost_a_pause_and_nothing_else() -> None:
    fault = Fault(("router", "ingress"))
    fine = Figures(fault.name, 8, 3, 0, 0, 2.0, 4.0)
    assert failures_of(fault, fine) == []
    (wrong,) = failures_of(fault, replace(fine, changed=2))
    assert wrong == "kill router + ingress: 2 changed"
    (wrong,) = failures_of(fault, replace(fine, back_after_s=None))
    assert "not back" in wrong
    undisturbed = Figures("none", 8, 0, 0, 0, 2.0, None)
    assert failures_of(Fault(()), undisturbed) == []
    assert len(failures_of(Fault(()), replace(undisturbed, broken=1))) == 1


def test_a_role_is_back_when_every_replica_of_all_its_deployments_runs() -> None:
    states = {"target": {"RUNNING": 2}, "expert-sql": {"RUNNING": 1, "STARTING": 0}}
    assert all_run(states, "target", 2)
    assert not all_run(states, "target", 1)
    assert not all_run(states, "expert", 2)
    assert all_run(states | {"expert-general": {"RUNNING": 1}}, "expert", 2)
    assert not all_run(states | {"expert-general": {"STARTING": 1}}, "expert", 2)


def test_experts_die_in_a_pool_and_a_quick_run_says_what_it_skips(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert passes_of(quick=False) == [("colocated", FAULTS), ("pool", POOL_FAULTS)]
    assert not any("expert" in fault.roles for fault in FAULTS)
    assert all("expert" in fault.roles for fault in POOL_FAULTS)
    assert capsys.readouterr().err == ""
    assert passes_of(quick=True) == [("colocated", QUICK)]
    skipped = capsys.readouterr().err
    assert "kill every expert" in skipped
    assert "stop router" in skipped
    assert "kill registry," not in skipped


def test_a_stream_that_ends_before_its_client_goes_away_is_a_failure_of_the_soak() -> None:
    class LongStay(random.Random):
        def randrange(self, *_: Any, **__: Any) -> int:
            return 11

        def choices(self, population: Any, *_: Any, **__: Any) -> list[Any]:
            return [kind for kind in population if kind == "disconnects"]

        def choice(self, seq: Any) -> Any:
            return seq[0]

        def random(self) -> float:
            return 0.0

        def expovariate(self, lambd: float = 1.0) -> float:
            return 0.001 / lambd

    async def main() -> Mixed:
        async with listening(*[ends_early] * 100) as server:
            mixed = Mixed(server.url)
            client = asyncio.create_task(mixed._client(LongStay(0), 0))
            while mixed.sent.total() < 2 and not client.done():
                await asyncio.sleep(0.01)
            mixed.stop()
            await client
        return mixed

    mixed = asyncio.run(main())
    ((what, count),) = mixed.failures.items()
    assert what == "disconnects: ValueError: the stream ended before its client disconnected"
    assert count == mixed.sent["disconnects"]
