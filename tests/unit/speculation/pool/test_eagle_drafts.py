"""EAGLE drafts in processes of their own: hidden states travel with the tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import request, run, tokens_of
from pools import make_proposer
from tiny_models import save_tiny

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool import client as client_module
from paceline.actors.speculation.pool.build import build_server
from paceline.actors.speculation.pool.client import ExpertClient
from paceline.actors.speculation.pool.connection import MAX_FRAME_BYTES, connect
from paceline.actors.speculation.pool.hidden_states import ReceivedStates, num_states, to_bytes
from paceline.actors.speculation.pool.messages import (
    DraftRequest,
    DraftRequestRow,
    Message,
    Welcome,
    encode,
)
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.weights.eagle import new_draft, save_draft

EXPERTS = ("a", "b")
LONG = [5 + i % 90 for i in range(70)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TargetSettings:
    """Two experts that read hidden states, of a target in the precision in which these travel."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny(folder / "target", 1)
    drafts = {}
    for seed, name in enumerate(EXPERTS):
        draft = new_draft(target)
        generator = torch.Generator().manual_seed(seed)
        draft.fuse.weight.data += 0.1 * torch.randn(draft.fuse.weight.shape, generator=generator)
        save_draft(draft, folder / name)
        drafts[name] = str(folder / name)
    return TargetSettings(
        str(target), drafts, dtype="bfloat16", device="cpu", num_threads=1, max_num_seqs=4,
        num_speculative_tokens=3, prefill_chunk=16, seed=0,
    )  # fmt: skip


@contextlib.contextmanager
def pooled(
    settings: TargetSettings, **fields: Any
) -> Iterator[tuple[Engine, PoolProposer, dict[str, ExpertServer]]]:
    """An engine, its proposer, and the experts' servers of this process."""
    own = replace(settings, placement="pool", **fields)
    servers = {name: build_server(ExpertSettings(name, own, max_sequences=4)) for name in EXPERTS}
    proposer = make_proposer(EXPERTS)
    try:
        for name, server in servers.items():
            proposer.attach(name, *connect(server.open_session("test"), 10.0))
        yield build_engine(own, proposer)[0], proposer, servers
    finally:
        for server in servers.values():
            server.close()


def asked(**fields: Any) -> list[GenerationRequest]:
    prompts = ([5, 6, 7], LONG, [40], LONG[:20])
    return [
        request(f"r{i}", prompt, draft=EXPERTS[i % 2], ignore_eos=True, **fields)
        for i, prompt in enumerate(prompts)
    ]


def texts(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(engine, requests).items()}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 11}])
def test_texts_and_statistics_are_the_colocated_ones(
    settings: TargetSettings, fields: dict[str, Any]
) -> None:
    here = run(build_engine(settings)[0], asked(**fields))
    with pooled(settings) as (engine, proposer, _):
        there = run(engine, asked(**fields))
        assert all(facts["lost"] == facts["sent_again"] == 0 for facts in proposer.stats().values())
    stats = {}
    for name, outputs in here.items():
        assert tokens_of(there[name]) == tokens_of(outputs)
        stats[name] = [found[name][-1].chunk.speculative for found in (here, there)]
    # A long prompt is prefilled between rounds, which the first rounds do not wait for.
    assert stats["r0"][0] == stats["r0"][1]
    assert stats["r2"][0] == stats["r2"][1]
    assert all(there is not None and there.num_draft_tokens for _, there in stats.values())
    assert any(there is not None and there.num_accepted_draft_tokens for _, there in stats.values())


def test_a_server_has_the_states_that_the_target_keeps(settings: TargetSettings) -> None:
    with pooled(settings) as (engine, _, servers):
        for own in asked(max_tokens=30):
            engine.add(own)
        for _ in range(12):
            engine.step()
        kv = engine._runner.kv  # type: ignore[attr-defined]
        compared = 0
        for server in servers.values():
            for client in server._drafter._sequences.values():
                for name, sequence in client.items():
                    count = len(sequence.tokens) - 1
                    states, filled = server._drafter._hidden._states[sequence.key]
                    assert filled == count
                    row = engine._rows.row(name)  # type: ignore[attr-defined]
                    kept = kv.read_hidden([row], torch.arange(count)[None])[0]
                    assert torch.equal(states[:count], kept)
                    compared += 1
        assert compared == 4
        run(engine)


def test_long_prompts_travel_in_parts(
    settings: TargetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = texts(build_engine(settings)[0], asked(num_speculative_tokens=0))
    monkeypatch.setattr(client_module, "_MAX_STATE_BYTES", 9 * 2 * 32)
    with pooled(settings) as (engine, proposer, servers):
        found = run(engine, asked())
        assert {name: tokens_of(outputs) for name, outputs in found.items()} == plain
        assert all(facts["lost"] == facts["sent_again"] == 0 for facts in proposer.stats().values())
        assert all(server._drafter.failures == 0 for server in servers.values())
    assert all(outputs[-1].chunk.speculative.num_draft_tokens for outputs in found.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("hidden", [2048, 16384])
def test_states_of_a_long_prompt_fit_into_a_frame(hidden: int) -> None:
    sent: list[Message] = []
    client = ExpertClient("a")
    client.connect(SimpleNamespace(send=sent.append), Welcome(1, {}, hidden))  # type: ignore[arg-type]
    row = DraftRow("r", "a", [5] * 3000, 0, 1, asked()[0].sampling)
    client.request(1, [row], False, 0.0, lambda _, start, stop: bytes(2 * hidden * (stop - start)))
    assert 2**22 < len(encode(sent[0])) < MAX_FRAME_BYTES // 2


def test_a_server_that_has_forgotten_everything_is_sent_it_again(settings: TargetSettings) -> None:
    plain = texts(build_engine(settings)[0], asked(num_speculative_tokens=0))
    with pooled(settings) as (engine, proposer, servers):
        for own in asked():
            engine.add(own)
        outputs = [output for _ in range(10) for output in engine.step()]
        for server in servers.values():  # as after an exception in its stack
            keys = {seq.key for seq in server._drafter._all_sequences()}
            server._commands.put(lambda d=server._drafter, k=keys: d._fail(k))
        rest = [output for found in run(engine).values() for output in found]
        answers: dict[str, list[int]] = {}
        for output in (*outputs, *rest):
            answers.setdefault(output.request_id, []).extend(output.chunk.token_ids)
        assert answers == plain
        assert sum(facts["sent_again"] for facts in proposer.stats().values()) == 4


def test_new_weights_are_computed_from_all_states(settings: TargetSettings) -> None:
    """After a swap the keys and values of the whole sequence are computed anew."""
    with pooled(settings) as (engine, _, servers):
        reference = texts(engine, asked())
        state = new_draft(settings.model_path).state_dict()
        for own in asked(max_tokens=40):
            engine.add(own)
        for _ in range(6):
            engine.step()
        for name, server in servers.items():
            server.load_weights(name, 3, state)
            assert server.ping(5.0)
        outputs = run(engine)
        assert all(s._drafter.failures == 0 for s in servers.values())
        versions = {o[-1].chunk.speculative.weight_version for o in outputs.values()}  # type: ignore[union-attr]
        assert versions == {3}
        assert reference == texts(engine, asked())


def test_states_of_another_size_are_not_taken(settings: TargetSettings) -> None:
    with pooled(settings) as (_, _, servers):
        drafter = servers["a"]._drafter
        sampling = asked()[0].sampling
        for hidden in (b"", b"123", bytes(2 * 32 * 3)):
            row = DraftRequestRow("r", "a", 0, (5, 6, 7), 0, 2, sampling, hidden)
            (response,) = drafter.propose([(0, DraftRequest(1, (row,)))])
            assert response.unknown_rows == (0,)
        assert drafter.failures == 0


def test_states_are_read_as_they_were_sent() -> None:
    states = torch.randn(10, 4).bfloat16()
    received = ReceivedStates(4, torch.float32, CPU)
    start = 0
    for count in (1, 4, 2, 4):  # tokens
        sent = num_states(start, count)
        received.extend("r", to_bytes(states[max(start - 1, 0) : start + count - 1]))
        assert received.fits(to_bytes(states[:sent]), sent)
        start += count
    row = DraftRow("r", "a", [0] * start, 0, 1, asked()[0].sampling)
    found = received.read([row, row], torch.tensor([[-1, 0, 1], [7, 8, 9]]))
    assert torch.equal(found[0, 0], torch.zeros(4))
    assert torch.equal(found[0, 1:], states[:2].float())
    assert torch.equal(found[1], states[7:].float())
    received.drop("r")
    assert received._states == {}
