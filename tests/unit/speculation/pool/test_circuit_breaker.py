"""The circuit breaker of an expert."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.speculation.pool.circuit_breaker import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    CircuitState,
    ExpertCircuit,
)


def test_an_expert_without_a_connection_is_neither_asked_nor_pinged() -> None:
    circuit = ExpertCircuit()
    assert not circuit.closed
    assert not circuit.due(1e9)
    circuit.connected()
    assert circuit.closed
    circuit.disconnected()
    assert not circuit.closed
    assert not circuit.due(1e9)


def test_silence_opens_a_ping_after_the_back_off_closes() -> None:
    circuit = ExpertCircuit()
    circuit.connected()
    circuit.failed(10.0)
    assert circuit.state is CircuitState.OPEN
    circuit.pong()  # to nobody's ping
    assert not circuit.closed
    assert not circuit.due(10.0 + 0.9 * FIRST_BACKOFF_S)
    assert circuit.due(10.0 + FIRST_BACKOFF_S)
    assert circuit.state is CircuitState.HALF_OPEN
    assert not circuit.due(10.0 + FIRST_BACKOFF_S)  # one ping per back-off
    circuit.pong()
    assert circuit.closed


def test_pings_without_answer_become_rarer_and_an_answer_in_time_forgives_all() -> None:
    circuit = ExpertCircuit()
    circuit.connected()
    circuit.failed(0.0)
    now, waits = 0.0, []
    while len(waits) < 8:
        last = now
        while not circuit.due(now):
            now += 0.01
        waits.append(now - last)
    assert all(later >= wait - 0.02 for wait, later in itertools.pairwise(waits))
    assert waits[-1] > 4 * waits[0]
    assert waits[-1] <= LONGEST_BACKOFF_S + 0.02
    circuit.pong()
    circuit.answered()
    circuit.failed(now)
    assert circuit.backoff_s == FIRST_BACKOFF_S


def test_one_that_answers_pings_but_never_in_time_is_waited_for_less_and_less() -> None:
    circuit = ExpertCircuit()
    circuit.connected()
    now, waited = 0.0, []
    while now < 100.0:
        if circuit.closed:
            waited.append(now)
            circuit.failed(now)
        elif circuit.due(now):
            circuit.pong()
        now += 0.01
    assert len(waited) < 20
    assert waited[-1] - waited[-2] >= LONGEST_BACKOFF_S


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["connected", "disconnected", "failed", "answered", "due", "pong"]),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_an_open_circuit_is_looked_at_again(
    events: list[tuple[str, float]],
) -> None:
    """And a closed one is never pinged; the back-off keeps its bounds."""
    circuit, now, linked = ExpertCircuit(), 0.0, False
    for event, later in events:
        now += later
        if event == "due":
            before = circuit.state
            if circuit.due(now):
                assert linked
                assert before is not CircuitState.CLOSED
                assert circuit.state is CircuitState.HALF_OPEN
        elif event == "failed":
            if linked and circuit.closed:
                circuit.failed(now)
        elif event == "answered":
            if circuit.closed:
                circuit.answered()
                assert circuit.backoff_s == 0.0
        else:
            getattr(circuit, event)()
            linked = {"connected": True, "disconnected": False}.get(event, linked)
        assert 0.0 <= circuit.backoff_s <= LONGEST_BACKOFF_S
        assert linked or not circuit.closed
    if linked and not circuit.closed:
        assert circuit.due(now + LONGEST_BACKOFF_S)
        circuit.pong()
        assert circuit.closed
