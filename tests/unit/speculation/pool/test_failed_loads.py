"""Weights that an expert of the pool cannot load: its thread goes on, a candidate has failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
from engines import run, tokens_of
from pools import attached, make_drafter, pool_engine
from slotted import IDS, SHARE, asked, plain, short_of_memory, state
from waiting import wait_until

from paceline.actors.engine.engine import Engine
from paceline.actors.speculation.pool.server import ExpertServer

MISFIT = {"lm_head.weight": torch.zeros(1)}


@contextlib.contextmanager
def serving() -> Iterator[tuple[ExpertServer, Engine]]:
    """The expert a with a candidate, version 7, and a target that drafts with it."""
    drafter = make_drafter("a", candidate=True)
    drafter.load_weights("a@candidate", 7, state(2))
    server = ExpertServer(drafter, num_threads=1)
    try:
        engine = pool_engine(attached({"a": server}), target_layers=1, canary_share=SHARE)
        run(engine, [asked("first-1")])  # a response lists the slots
        yield server, engine
    finally:
        server.close()


def versions(server: ExpertServer) -> dict[str, int]:
    assert server.ping(10.0)
    return server._drafter.slots.versions


def rounds_of(engine: Engine) -> list[int]:
    """Run requests, check their text, return the rounds with drafts of each."""
    outputs = run(engine, [asked(name) for name in IDS])
    assert all(tokens_of(outputs[name]) == plain(name) for name in IDS)
    stats = [outputs[name][-1].chunk.speculative for name in IDS]
    return [0 if one is None else one.num_spec_steps for one in stats]


def retry_in(server: ExpertServer, seconds: float) -> None:
    """Put off, or bring forward, the next retry of a partial load."""

    def put() -> None:
        load = server._drafter.slots.partial_loads._loads["a"]
        load.due_s = time.monotonic() + seconds

    server._commands.put(put)


@pytest.mark.parametrize("fits", [False, True])
def test_a_candidate_that_cannot_be_loaded_has_failed(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread must survive: a restarted one would load the same weights again."""
    with serving() as (server, engine):
        with monkeypatch.context() as scarce:
            if fits:
                short_of_memory(scarce)
            server.load_weights("a@candidate", 8, state(1) if fits else MISFIT)
            assert versions(server) == {"a": 0, "a@0": 0}
        assert server.failed_candidate() == 8
        assert all(rounds_of(engine))
        server.load_weights("a@candidate", 9, state(1))
        assert versions(server)["a@candidate"] == 9


def test_stable_weights_that_were_loaded_in_part_draft_nothing_and_are_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as (server, engine):
        server.load_weights("a@candidate", 0, None)
        with monkeypatch.context() as scarce:
            short_of_memory(scarce)
            server.load_weights("a", 1, state(1))
            retry_in(server, 600.0)
            assert versions(server)["a"] == 0
        assert rounds_of(engine) == [0] * len(IDS)
        assert server.failed_candidate() is None
        assert run(engine, [asked("again-1", draft="a@0")])["again-1"][-1].chunk.speculative
        retry_in(server, 0.3)  # without requests the thread must wake by itself
        wait_until(lambda: server._drafter.slots.versions["a"] == 1, "the weights")
        assert all(rounds_of(engine))


def test_the_old_weights_stay_if_new_stable_ones_do_not_fit() -> None:
    with serving() as (server, engine):
        server.load_weights("a", 1, MISFIT)
        assert versions(server)["a"] == 0
        assert all(rounds_of(engine))
        assert server.failed_candidate() is None
