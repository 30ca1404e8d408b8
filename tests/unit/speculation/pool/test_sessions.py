"""Sessions that are kept open by a target, over streams without Serve."""

from __future__ import annotations

import asyncio

import pytest
from pools import make_proposer, serving
from waiting import wait_until

from paceline.actors.speculation.pool import sessions
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.pool.sessions import SessionManager


class Stream:
    """What a replica's open_session yields, with a heartbeat every 10 ms until it is ended."""

    def __init__(self, server: ExpertServer, name: str) -> None:
        self.name = name
        self.ended = self.cancelled = False
        self._server = server
        self._session: Session | None = server.open_session(name)

    async def __anext__(self) -> Session | None:
        await asyncio.sleep(0.01)
        if self.ended:
            raise StopAsyncIteration
        session, self._session = self._session, None
        return session

    def cancel(self) -> None:
        self.cancelled = True
        self._server.close_session(self.name)


def test_a_session_is_opened_again_and_a_lost_connection_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_FIRST_RETRY_S", 0.01)
    streams: list[Stream] = []
    # What Serve makes of a call that its replica has cancelled is a CancelledError.
    failures: list[BaseException] = [RuntimeError("no replica"), asyncio.CancelledError()]
    with serving(("a",)) as servers:
        server = servers["a"]
        proposer = make_proposer(("a",))

        def open_session() -> Stream:
            if failures:
                raise failures.pop()
            streams.append(Stream(server, f"session-{len(streams)}"))
            return streams[-1]

        SessionManager(proposer).add("a", open_session)
        assert proposer.wait_connected(10.0) == ["a"]
        wait_until(lambda: server.is_connected("session-0"), "the first session")
        proposer.propose([])
        proposer._clients["a"].disconnect()
        wait_until(lambda: not proposer.needs_connection("a"), "a connection in place of the lost")
        assert len(streams) == 1
        streams[0].ended = True
        wait_until(lambda: server.is_connected("session-1"), "the second session")
        assert streams[0].cancelled
        assert not server.is_connected("session-0")
        failures += [RuntimeError("the end")] * 1000  # the manager's thread never ends
        streams[1].ended = True
