"""The circuit breaker of an expert."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.speculation.pool.circuit_breaker import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    CircuitBreaker,
    CircuitState,
)


def test_an_expert_without_a_connection_is_not_pinged() -> None:
    circuit = CircuitBreaker()
    assert not circuit.closed
    assert not circuit.should_ping(1e9)
    circuit.on_connect()
    assert circuit.closed
    circuit.on_disconnect()
    assert not circuit.closed
    assert not circuit.should_ping(1e9)


def test_a_timeout_opens_and_a_pong_after_the_backoff_closes() -> None:
    circuit = CircuitBreaker()
    circuit.on_connect()
    circuit.on_timeout(10.0)
    assert circuit.state is CircuitState.OPEN
    circuit.on_pong()  # to no ping
    assert not circuit.closed
    assert not circuit.should_ping(10.0 + 0.9 * FIRST_BACKOFF_S)
    assert circuit.should_ping(10.0 + FIRST_BACKOFF_S)
    assert circuit.state is CircuitState.HALF_OPEN
    assert not circuit.should_ping(10.0 + FIRST_BACKOFF_S)  # one ping per backoff
    circuit.on_pong()
    assert circuit.closed


def test_the_backoff_doubles_without_pongs_and_a_response_resets_it() -> None:
    circuit = CircuitBreaker()
    circuit.on_connect()
    circuit.on_timeout(0.0)
    now, waits = 0.0, []
    while len(waits) < 8:
        last = now
        while not circuit.should_ping(now):
            now += 0.01
        waits.append(now - last)
    assert all(later >= wait - 0.02 for wait, later in itertools.pairwise(waits))
    assert waits[-1] > 4 * waits[0]
    assert waits[-1] <= MAX_BACKOFF_S + 0.02
    circuit.on_pong()
    circuit.on_response()
    circuit.on_timeout(now)
    assert circuit._backoff.delay == FIRST_BACKOFF_S


def test_rounds_wait_ever_less_for_an_expert_that_only_answers_pings() -> None:
    circuit = CircuitBreaker()
    circuit.on_connect()
    now, waited = 0.0, []
    while now < 100.0:
        if circuit.closed:
            waited.append(now)
            circuit.on_timeout(now)
        elif circuit.should_ping(now):
            circuit.on_pong()
        now += 0.01
    assert len(waited) < 20
    assert waited[-1] - waited[-2] >= MAX_BACKOFF_S


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["on_connect", "on_disconnect", "on_timeout", "on_response", "should_ping", "on_pong"]
        ),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_an_open_circuit_is_probed_again_after_any_events(
    events: list[tuple[str, float]],
) -> None:
    """A closed one is never pinged; the backoff keeps its bounds."""
    circuit, now, connected = CircuitBreaker(), 0.0, False
    for event, later in events:
        now += later
        if event == "should_ping":
            before = circuit.state
            if circuit.should_ping(now):
                assert connected
                assert before is not CircuitState.CLOSED
                assert circuit.state is CircuitState.HALF_OPEN
        elif event == "on_timeout":
            if connected and circuit.closed:
                circuit.on_timeout(now)
        elif event == "on_response":
            if circuit.closed:
                circuit.on_response()
                assert circuit._backoff.delay == 0.0
        else:
            getattr(circuit, event)()
            connected = {"on_connect": True, "on_disconnect": False}.get(event, connected)
        assert 0.0 <= circuit._backoff.delay <= MAX_BACKOFF_S
        assert connected or not circuit.closed
    if connected and not circuit.closed:
        assert circuit.should_ping(now + MAX_BACKOFF_S)
        circuit.on_pong()
        assert circuit.closed
