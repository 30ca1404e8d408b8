"""Token sources: correct, at the right tokens, and without effect on them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import TOKENIZER, make_engine, request, run, tokens_of, twin_engine

from paceline.actors.engine.detokenizer import IncrementalDetokenizer
from paceline.actors.engine.engine import StepOutput
from paceline.actors.engine.request import TokenSource, merge_chunks
from paceline.actors.engine.sampling import TargetProbs
from paceline.actors.engine.sequence import Sequence
from paceline.actors.engine.token_sources import token_sources
from paceline.actors.speculation.rejection_sampler import Proposal, RejectionSampleOutput

PROMPT = TOKENIZER.encode("Ann has 12 apples. She buys 30 more. How many", add_special_tokens=False)


def sources_of(outputs: list[StepOutput]) -> list[TokenSource]:
    """One entry per token of every chunk, or the test fails."""
    for output in outputs:
        assert output.chunk.token_sources is not None
        assert len(output.chunk.token_sources) == len(output.chunk.token_ids)
    return [item for output in outputs for item in output.chunk.token_sources or ()]


def test_a_draft_that_is_the_target_is_accepted_with_a_bonus() -> None:
    asked = request("r", PROMPT, max_tokens=10, ignore_eos=True, token_sources=True)
    found = sources_of(run(twin_engine(), [asked])["r"])
    kinds = [item.kind for item in found]
    # the first token comes with the prompt; the budget leaves an answer's last one to the target
    assert kinds == ["plain", *(["accepted"] * 3 + ["bonus"]) * 2, "plain"]
    drafts = [(i.draft, i.weight_version) for i in found]
    assert drafts == [(None, None), *[("a", 0)] * 8, (None, None)]
    assert all(i.acceptance_probability is None for i in found)  # greedy leaves nothing to chance
    assert all(i.rejected_token_id is None for i in found)


def test_a_rejected_token_is_reported_with_its_draft() -> None:
    asked = request("r", PROMPT, max_tokens=30, ignore_eos=True, token_sources=True)
    outputs = run(make_engine(k=2), [asked])["r"]
    found = sources_of(outputs)
    stats = outputs[-1].chunk.speculative
    assert stats is not None
    assert sum(i.kind == "accepted" for i in found) == stats.num_accepted_draft_tokens
    recovered = [i for i in found if i.kind == "recovered"]
    assert len(recovered) > 5
    for token, item in zip(tokens_of(outputs), found, strict=True):
        assert (item.rejected_token_id is not None) == (item.kind == "recovered")
        assert item.rejected_token_id != token


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}])
def test_asking_changes_no_token_and_costs_the_others_nothing(fields: dict[str, Any]) -> None:
    asked = request("r", PROMPT, max_tokens=24, ignore_eos=True, **fields)
    other = request("s", PROMPT[:7], max_tokens=24, ignore_eos=True, draft="b", **fields)
    without = run(make_engine(k=3), [asked, other])
    sourced = run(make_engine(k=3), [replace(asked, token_sources=True), other])
    for name in ("r", "s"):
        assert tokens_of(sourced[name]) == tokens_of(without[name])
    assert len(sources_of(sourced["r"])) == 24
    assert all(output.chunk.token_sources is None for output in sourced["s"])


def test_the_target_s_probability_is_its_log_probability_s() -> None:
    fields = {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.5, "logprobs": 0}
    asked = request("r", PROMPT, max_tokens=24, ignore_eos=True, token_sources=True, **fields)
    outputs = run(make_engine(k=3), [asked, request("greedy", PROMPT, token_sources=True)])["r"]
    logprobs = [item for output in outputs for item in output.chunk.logprobs or ()]
    found = sources_of(outputs)
    for item, other in zip(found, logprobs, strict=True):
        assert math.isclose(item.target_probability, math.exp(other.logprob), rel_tol=1e-4)
        assert item.text_offset == other.text_offset


def test_seeded_requests_repeat_and_unseeded_ones_differ() -> None:
    asked = request(
        "r", PROMPT, max_tokens=24, ignore_eos=True, token_sources=True, temperature=0.9
    )
    seeded = replace(asked, request_id="s", sampling=replace(asked.sampling, seed=1))
    outputs = run(make_engine(k=3), [asked, seeded])
    assert all(i.acceptance_probability is None for i in sources_of(outputs["s"]))
    for item in sources_of(outputs["r"]):
        tried = item.kind in ("accepted", "recovered")
        assert (item.acceptance_probability is not None) == tried


def test_draft_tokens_are_accepted_as_often_as_is_said() -> None:
    """Every look at a draft token is a coin of its reported probability."""
    asked = [
        request(
            f"r{i}", PROMPT, max_tokens=60, ignore_eos=True, token_sources=True, temperature=1.3
        )
        for i in range(8)
    ]
    tried = [
        item
        for outputs in run(twin_engine(k=3, support=8, seed=5), asked).values()
        for item in sources_of(outputs)
        if item.acceptance_probability is not None
    ]
    chances = [item.acceptance_probability or 0.0 for item in tried]
    accepted = sum(item.kind == "accepted" for item in tried)
    spread = math.sqrt(sum(p * (1 - p) for p in chances))
    assert len(tried) > 200
    assert spread > 2.0  # the draft's distribution is truncated: not all of it is certain
    assert abs(accepted - sum(chances)) < 4 * spread


def test_min_of_one_and_p_over_q_of_the_drafted_token() -> None:
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = p.log().expand(1, 3, 4).clone()
    asked = request("r", [1], temperature=1.0, token_sources=True, draft="a@0")
    sequence = Sequence(
        asked, IncrementalDetokenizer(TOKENIZER), 9, None, weight_version=7, recorder=None
    )
    proposal = Proposal(
        token_ids=torch.tensor([[0, 2]]),
        num_drafted=torch.tensor([2]),
        token_probs=torch.tensor([[0.4, 0.5]]),
        support_ids=torch.tensor([[[0], [2]]]),
        support_probs=torch.tensor([[[0.4], [0.5]]]),
    )
    sampled = RejectionSampleOutput(
        torch.tensor([1]), torch.tensor([1]), TargetProbs(p.expand(1, 3, 4))
    )
    ((first, second),) = token_sources([sequence], proposal, sampled, logits, [[0, 1]])
    assert (first.kind, first.draft, first.weight_version) == ("accepted", "a@0", 7)
    assert (second.kind, second.rejected_token_id) == ("recovered", 2)
    assert first.acceptance_probability == 1.0
    assert second.acceptance_probability == pytest.approx(0.125 / 0.5)
    assert first.target_probability == pytest.approx(0.5)
    assert second.target_probability == pytest.approx(0.25)


def test_with_stop_strings_sources_come_with_their_tokens_and_the_cut_ones_never() -> None:
    asked = request("r", PROMPT, max_tokens=40, ignore_eos=True, token_sources=True)
    whole = run(make_engine(k=3), [asked])["r"]
    text = merge_chunks([output.chunk for output in whole]).text
    stop = text[11:15]
    cut = run(make_engine(k=3), [replace(asked, sampling=replace(asked.sampling, stop=(stop,)))])
    kept, found = sources_of(whole), sources_of(cut["r"])
    assert cut["r"][-1].chunk.num_cut_tokens > 0
    assert 0 < len(found) < len(kept)
    assert found == kept[: len(found)]


def test_offsets_cut_the_text_into_its_tokens() -> None:
    asked = request(
        "r", PROMPT, max_tokens=60, ignore_eos=True, token_sources=True, temperature=2.0
    )
    outputs = run(make_engine(k=3), [replace(asked, sampling=replace(asked.sampling, seed=4))])["r"]
    text = merge_chunks([output.chunk for output in outputs]).text
    starts = [item.text_offset for item in sources_of(outputs)]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] <= len(text)
    pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text
    for token, piece in zip(tokens_of(outputs), pieces, strict=True):
        own = TOKENIZER.decode([token], skip_special_tokens=True)
        assert "�" in own or "�" in piece or own == piece


def test_the_end_of_sequence_token_has_a_source_too() -> None:
    answer = tokens_of(run(make_engine(), [request("r", PROMPT, max_tokens=20)])["r"])
    asked = request("r", PROMPT, max_tokens=20, token_sources=True)
    outputs = run(make_engine(eos=answer[5]), [asked])["r"]
    assert outputs[-1].chunk.finish_reason == "stop"
    assert len(sources_of(outputs)) == answer.index(answer[5]) + 1


def test_sources_continue_after_a_resume() -> None:
    asked = request("r", PROMPT, max_tokens=30, ignore_eos=True, token_sources=True)
    whole = run(make_engine(k=3), [asked])["r"]
    seen = whole[:4]
    again = replace(
        asked,
        output_token_ids=tuple(tokens_of(seen)),
        sent_chars=sum(len(output.chunk.text) for output in seen),
        attempt=1,
    )
    rest = run(make_engine(k=0), [again])["r#1"]
    found = sources_of(seen) + sources_of(rest)
    assert [item.text_offset for item in found] == [i.text_offset for i in sources_of(whole)]
    assert {item.kind for item in sources_of(rest)} == {"plain"}
    assert sources_of(seen) == sources_of(whole)[: len(tokens_of(seen))]
