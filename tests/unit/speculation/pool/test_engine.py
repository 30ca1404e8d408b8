"""Engines that draft through real sockets: the text is the colocated one, whatever fails."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import make_engine, request, run, served, tokens_of
from pools import (
    VOCAB,
    ExpertProcess,
    attached,
    make_proposer,
    pool_engine,
    serving,
)
from tiny_models import tiny_llama
from waiting import wait_until

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import AddExpert
from paceline.actors.speculation.pool.connection import ConnectionLostError, connect
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.profile import profile_pool
from paceline.actors.speculation.pool.proposer import PoolProposer

PROMPTS = [(1, 17, 33, 60), (1, 5, 9, 13, 200, 77, 41, 8, 90), (1, 250)]


def requests(**fields: Any) -> list[GenerationRequest]:
    drafts = ("a", "b", "a@0")
    return [
        request(f"r{i}", prompt, draft=drafts[i], ignore_eos=True, **fields)
        for i, prompt in enumerate(PROMPTS)
    ]


def texts(engine: Engine, asked: list[GenerationRequest]) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(engine, asked).items()}


def assert_no_failures(proposer: PoolProposer) -> None:
    """Every round had its responses."""
    for facts in proposer.stats().values():
        assert facts["circuit"] == "closed"
        assert (facts["silent"], facts["lost"], facts["late"], facts["sent_again"]) == (0,) * 4


@pytest.mark.parametrize("draft_ahead", ["off", "on"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.8, "seed": 11, "top_p": 0.9},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((7, 3.0),)},
    ],
)
def test_texts_and_statistics_are_the_colocated_ones(
    draft_ahead: str, fields: dict[str, Any]
) -> None:
    here = run(make_engine(draft_seed=2), requests(**fields))
    with serving(draft_ahead=draft_ahead) as servers:
        proposer = attached(servers)
        there = run(pool_engine(proposer), requests(**fields))
        assert_no_failures(proposer)
        wait_until(lambda: not any(s._drafter.num_sequences for s in servers.values()), "release")
    for name, outputs in here.items():
        assert tokens_of(there[name]) == tokens_of(outputs)
        if draft_ahead == "off":  # ahead may answer with fewer tokens than asked for
            assert there[name][-1].chunk.speculative == outputs[-1].chunk.speculative
        assert there[name][-1].record is not None
        speculative = there[name][-1].chunk.speculative
        assert speculative is not None
        assert speculative.num_draft_tokens > 0


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 3}])
def test_a_draft_that_is_the_target_is_accepted_whole(fields: dict[str, Any]) -> None:
    """Unseeded too: where q is p nothing is rejected, drafted ahead or not."""
    with serving(("a",), draft_ahead="on", support=VOCAB) as servers:
        servers["a"].load_weights("a", 1, served(tiny_llama(9, layers=1, vocab=VOCAB)).state_dict())
        proposer = attached(servers)
        engine = pool_engine(proposer, target_seed=9, target_layers=1)
        outputs = run(engine, [request("r", PROMPTS[0], ignore_eos=True, max_tokens=60, **fields)])
        assert_no_failures(proposer)
    speculative = outputs["r"][-1].chunk.speculative
    assert speculative is not None
    assert speculative.num_draft_tokens >= 40
    assert speculative.draft_acceptance_rate > 0.97  # rounding may differ in the last bit


@pytest.mark.parametrize("chunk", [256, 8])
def test_costs_are_measured_through_the_pool_and_its_sequences_released(
    caplog: pytest.LogCaptureFixture, chunk: int
) -> None:
    """Also with prompts prefilled in many chunks."""
    settings = TargetSettings("", {"a": "", "b": ""}, max_num_seqs=4)
    with serving(chunk=chunk) as servers:
        proposer = attached(servers)
        costs = profile_pool(proposer, settings, [1, 2, 4], target_s=1e6)
        assert_no_failures(proposer)
        wait_until(lambda: not any(s._drafter.num_sequences for s in servers.values()), "release")
    assert costs.keys() == {(b, e) for b in (1, 2, 4) for e in (1, 2)}
    assert all(0.0 < seconds < 1.0 for seconds in costs.values())
    assert not caplog.records


def test_two_targets_share_an_expert() -> None:
    plain = texts(make_engine(draft_seed=2), requests())
    with serving(draft_ahead="on") as servers:
        proposers = [attached(servers, f"target-{i}") for i in range(2)]
        engines = [pool_engine(proposer) for proposer in proposers]
        found: list[dict[str, list[int]]] = [{}, {}]

        def serve(i: int) -> None:
            found[i] = texts(engines[i], requests())

        threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for proposer in proposers:
            assert_no_failures(proposer)
        assert len([*servers["a"]._clients]) == 2
        assert servers["a"]._drafter.failures == 0
    assert found == [plain, plain]


def test_new_weights_are_seen_in_the_round_that_proposed_with_them() -> None:
    with serving() as servers:
        proposer = attached(servers)
        engine = pool_engine(proposer)
        plain = texts(engine, requests())
        servers["a"].load_weights(
            "a", 3, served(tiny_llama(50, layers=1, vocab=VOCAB)).state_dict()
        )
        outputs = run(engine, requests())
        assert_no_failures(proposer)
        assert engine.drafts() == {"a": 3, "a@0": 0, "b": 0, "b@0": 0}
    versions = {name: out[-1].record.weight_version for name, out in outputs.items()}  # type: ignore[union-attr]
    assert versions == {"r0": 3, "r1": 0, "r2": 0}
    assert {name: tokens_of(out) for name, out in outputs.items()} == plain


def test_tcp_serves_as_the_unix_socket_does() -> None:
    with serving(("a",), host="127.0.0.1") as servers:
        session = servers["a"].open_session("far")
        far = Session(session.name, session.key, b"\0nowhere", session.host, session.port)
        proposer = make_proposer(("a",))
        proposer.attach("a", *connect(far, 10.0))
        asked = [request("r", PROMPTS[0], ignore_eos=True)]
        assert texts(pool_engine(proposer), asked) == texts(make_engine(draft_seed=2), asked)
        assert_no_failures(proposer)


def test_closing_a_session_releases_everything() -> None:
    with serving(("a",)) as servers:
        server = servers["a"]
        session = server.open_session("mine")
        proposer = make_proposer(("a",))
        proposer.attach("a", *connect(session, 5.0))
        engine = pool_engine(proposer)
        engine.add(request("r", PROMPTS[0], ignore_eos=True))
        for _ in range(3):
            engine.step()
        wait_until(lambda: server._drafter.num_sequences == 1, "the sequence")
        server.close_session(session.name)
        wait_until(lambda: not server._drafter.num_sequences and not [*server._clients], "the end")
        with pytest.raises(ConnectionLostError):
            connect(session, 5.0)
        run(engine)
        assert proposer.needs_connection("a")


def test_without_any_expert_the_target_decodes_plainly() -> None:
    proposer = make_proposer()
    outputs = run(pool_engine(proposer), requests())
    assert {name: tokens_of(out) for name, out in outputs.items()} == texts(
        make_engine(draft_seed=2), requests()
    )
    assert all(facts["circuit"] == "open" for facts in proposer.stats().values())


def test_an_invalid_response_costs_the_connection_and_no_text() -> None:
    """A draft of another vocabulary must not reach the target's forward."""
    with serving(("a",)) as servers:
        proposer = make_proposer(("a",))
        proposer._vocab_size = 3
        proposer.attach("a", *connect(servers["a"].open_session("t"), 5.0))
        asked = [request("r", PROMPTS[0], ignore_eos=True)]
        assert texts(pool_engine(proposer), asked) == texts(make_engine(draft_seed=2), asked)
        assert proposer.stats()["a"]["lost"] == 1
        assert proposer.needs_connection("a")


@pytest.fixture(scope="module")
def process() -> Iterator[ExpertProcess]:
    expert = ExpertProcess("a")
    yield expert
    expert.end()


LONG = request("r", PROMPTS[0], ignore_eos=True, max_tokens=80)


@pytest.mark.full
def test_a_stopped_expert_costs_one_deadline_and_rejoins(process: ExpertProcess) -> None:
    plain = texts(make_engine(draft_seed=2), [LONG])
    proposer = make_proposer(("a",), timeout_s=0.3)
    proposer.attach("a", *connect(process.session, 10.0))
    engine = pool_engine(proposer, k=1)
    run(engine, [LONG])  # its first round may be slow
    before = proposer.stats()["a"]["silent"]
    engine.add(LONG)
    collected, longest, rounds = [], 0.0, 0
    while engine.has_work:
        rounds += 1
        if rounds == 10:
            process.signal(signal.SIGSTOP)
        if rounds == 20:
            process.signal(signal.SIGCONT)
            wait_until(lambda: _rejoined(proposer), "the stopped expert")
        began = time.monotonic()
        collected += engine.step()
        longest = max(longest, time.monotonic() - began)
    assert tokens_of(collected) == plain["r"]
    assert engine.draft_failures == 0
    facts = proposer.stats()["a"]
    assert facts["silent"] == before + 1  # further rounds did not wait
    assert facts["late"] >= 1  # what it said about a round long gone was dropped
    assert facts["lost"] == 0
    assert longest < 5.0
    answered = facts["answered"]
    run(engine, [LONG])
    assert proposer.stats()["a"]["answered"] > answered


def _rejoined(proposer: PoolProposer) -> bool:
    """Poll as a round does, on a machine with rare rounds."""
    proposer._poll_clients()
    return proposer.stats()["a"]["circuit"] == "closed"


def test_a_killed_expert_is_noticed_at_once_and_another_takes_its_place(
    process: ExpertProcess,
) -> None:
    """The last test of that process."""
    plain = texts(make_engine(draft_seed=2), [LONG])
    second = ExpertProcess("a")
    proposer = make_proposer(("a",), timeout_s=20.0)
    proposer.attach("a", *connect(process.session, 10.0))
    engine = pool_engine(proposer, k=1)
    engine.add(LONG)
    collected, rounds = [], 0
    try:
        while engine.has_work:
            rounds += 1
            if rounds == 10:
                process.end()
            began = time.monotonic()
            collected += engine.step()
            assert time.monotonic() - began < 15.0  # no round waits for it
            if rounds == 20:
                assert proposer.needs_connection("a")
                proposer.attach("a", *connect(second.session, 10.0))
                answered = proposer.stats()["a"]["answered"]
        assert tokens_of(collected) == plain["r"]
        facts = proposer.stats()["a"]
        assert facts["circuit"] == "closed"
        assert (facts["lost"], facts["silent"]) == (1, 0)
        assert facts["answered"] > answered + 5
        assert engine.draft_failures == 0
    finally:
        second.end()


def test_an_expert_joins_the_pool_while_requests_run() -> None:
    with serving(("a", "b")) as servers:
        proposer = attached({"a": servers["a"]})
        engine = pool_engine(proposer)
        engine.add(request("r0", PROMPTS[0], draft="a", ignore_eos=True))
        first = engine.step()
        assert "b" not in engine.drafts()
        proposer.add_client("b")
        engine.updates.put(AddExpert("b", "a"))  # twice is fine
        assert proposer.needs_connection("b")
        proposer.attach("b", *connect(servers["b"].open_session("test"), 10.0))
        engine.add(request("r1", PROMPTS[1], draft="b", ignore_eos=True))
        found = run(engine)
        both = {"a": "r0", "b": "r1"}
        for draft, name in both.items():
            outputs = [*(o for o in first if o.request_id == name), *found[name]]
            alone = make_engine(k=0)
            asked = request(name, PROMPTS[int(name[1])], draft=draft, ignore_eos=True)
            assert tokens_of(outputs) == texts(alone, [asked])[name]
            stats = outputs[-1].chunk.speculative
            assert stats is not None
            assert (stats.draft, stats.num_draft_tokens > 0) == (draft, True)
        assert_no_failures(proposer)
