"""Constrained answers beside all else that a request may ask for, and that may happen to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import MAX_LEN, TOKENIZER, make_engine, request, run, tokens_of
from grammars import json_grammar
from llguidance import LLMatcher
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.grammar import GrammarError, GrammarState
from paceline.actors.engine.kv_cache import BLOCK_SIZE
from paceline.actors.engine.request import GenerationRequest
from paceline.actors.training.batches import make_batch

PROMPT = TOKENIZER.encode("Ann has 12 apples. She buys 30 more.", add_special_tokens=False)
GRAMMARS = {
    "words": LLMatcher.grammar_from_regex("(e|o|en|on){30,60}"),
    "forced": LLMatcher.grammar_from_regex("The number is [0-9]{2}, (not|and) [a-c]{8}"),
    "list": json_grammar({"type": "array", "items": {"enum": ["Käse", 12, None]}, "maxItems": 9}),
    "free": "",
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.1, "seed": 6},
    "filtered": {"temperature": 0.9, "seed": 7, "top_p": 0.8, "prompt_logprobs": 1},
    "penalised": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": ((9, 3.0),)},
}


def everything(**fields: Any) -> list[GenerationRequest]:
    """A request of every grammar and sampling."""
    return [
        request(
            f"{name} {kind}", PROMPT[i:], grammar=grammar, **{"max_tokens": 32, **own}, **fields
        )
        for i, (kind, own) in enumerate(SAMPLINGS.items())
        for name, grammar in GRAMMARS.items()
    ]


def text_of(outputs: list[StepOutput]) -> str:
    return "".join(output.chunk.text for output in outputs)


def answers(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(engine, requests).items()}


def test_preempted_requests_answer_the_same_beside_free_ones() -> None:
    plain = answers(make_engine(max_num_seqs=16), everything(draft="off"))
    least = -(-MAX_LEN // BLOCK_SIZE) * BLOCK_SIZE
    engine = make_engine(max_num_seqs=8, kv_positions=least, draft_positions=MAX_LEN)
    assert answers(engine, everything()) == plain
    assert engine.preemptions > 0


@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_another_replica_goes_on_within_the_grammar(at: int) -> None:
    asked = everything()
    whole = run(make_engine(max_num_seqs=16), asked)
    seen = {
        r.request_id: whole[r.request_id][: min(at, len(whole[r.request_id]) - 1)] for r in asked
    }
    again = [
        replace(
            r,
            output_token_ids=tuple(tokens_of(seen[r.request_id])),
            sent_chars=len(text_of(seen[r.request_id])),
            attempt=1,
        )
        for r in asked
    ]
    rest = run(make_engine(k=2, draft_seed=7), again)
    for r, resumed in zip(asked, again, strict=True):
        before, after = seen[r.request_id], rest[resumed.run_id]
        assert tokens_of(before) + tokens_of(after) == tokens_of(whole[r.request_id])
        assert text_of(before) + text_of(after) == text_of(whole[r.request_id])
        assert after[-1].chunk.finish_reason == whole[r.request_id][-1].chunk.finish_reason


def test_output_outside_of_the_grammar_is_not_resumed() -> None:
    foreign = request("r", PROMPT, grammar=GRAMMARS["words"], output_token_ids=(9, 9))
    engine = make_engine()
    with pytest.raises(GrammarError, match="not in the grammar"):
        engine.add(foreign)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("regex", "fields", "expected"),
    [
        ("abcdef", {"stop": ("cd",)}, ("ab", "stop")),
        ("abcdef", {"stop": ("cd",), "include_stop": True}, ("abcd", "stop")),
        ("abcdef", {"stop": ("cd",), "min_tokens": 6}, ("abcdef", "stop")),
        ("abcdef", {"max_tokens": 2}, (None, "length")),
        ("abcdef", {"min_tokens": 20}, ("abcdef", "stop")),
        ("abcdef", {"ignore_eos": True}, ("abcdef", "stop")),
        ("abcdef", {"logit_bias": ((TOKENIZER.encode("a")[0], -100.0),)}, ("abcdef", "stop")),
        ("a{30}", {"min_tokens": 12, "repetition_penalty": 2.0}, ("a" * 30, "stop")),
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_the_grammar_goes_before_all_other_rules(
    regex: str, fields: dict[str, Any], expected: tuple[str | None, str], sampling: dict[str, Any]
) -> None:
    own = {"max_tokens": 40, "grammar": LLMatcher.grammar_from_regex(regex)} | sampling | fields
    requests = [request("on", PROMPT, **own), request("off", PROMPT, draft="off", **own)]
    for outputs in run(make_engine(), requests).values():
        text, reason = expected
        assert outputs[-1].chunk.finish_reason == reason
        assert text_of(outputs) == (regex[: len(text_of(outputs))] if text is None else text)


def test_choices_of_one_prompt_each_follow_the_grammar() -> None:
    own = {"grammar": GRAMMARS["words"], "temperature": 1.5, "seed": 3, "max_tokens": 30}
    for more in ({}, {"draft": "off"}):
        asked = [request(f"{i}", PROMPT, choice=i, **own, **more) for i in range(4)]
        found = answers(make_engine(), asked)
        assert len({tuple(tokens) for tokens in found.values()}) > 1
        for tokens in found.values():
            state = GrammarState(make_engine().grammars, GRAMMARS["words"])
            for token in tokens:
                state.append(token)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_and_records_are_without_the_mask(temperature: float) -> None:
    """Both are of the target's own softmax, at the tokens that the grammar allowed."""
    own: dict[str, Any] = {"grammar": GRAMMARS["forced"], "temperature": temperature}
    asked = request("r", PROMPT, logprobs=3, max_tokens=30, seed=4, top_p=0.9, **own)
    outputs = run(make_engine(), [asked])["r"]
    tokens = tokens_of(outputs)
    with torch.inference_mode():
        logits = tiny_llama(1)(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    raw = torch.log_softmax(logits, -1)
    entries = [entry for o in outputs for entry in o.chunk.logprobs or ()]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in entries]),
        raw[torch.arange(len(tokens)), torch.tensor(tokens)],
        atol=1e-4,
        rtol=1e-4,
    )
    assert [entry.top[0][0] for entry in entries] == raw.argmax(-1).tolist()
    record = outputs[-1].record
    assert record is not None
    ids = torch.tensor(record.target_top_ids, dtype=torch.int64)
    found = torch.tensor(record.target_top_logprobs).float()
    torch.testing.assert_close(found, raw.gather(-1, ids), atol=2e-2, rtol=1e-2)
    assert record.processed_top_probs is None
    # Drafts are compared with the target at the request's temperature, or a little less.
    batch = make_batch([record], max_length=128)
    scaled = torch.softmax(logits / (temperature or 1.0), -1).gather(-1, ids)
    assert bool((batch.processed_probs <= scaled + 2e-2).all())
    assert bool((batch.processed_probs >= 0.5 * scaled - 2e-2).all())
    assert int((batch.top_ids[:, 0] != batch.output_ids).sum()) > 5  # the mask had much to say


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("(a|b)*a(a|b){60}c"),
        LLMatcher.grammar_from_regex("(a?){400}a{400}"),
        LLMatcher.grammar_from_regex("((ab?c?){1,500}d?){1,500}"),
        "start: A\nA: ~/(a|b)*a(a|b){200}c/ & /[abc]{100,400}/",
        'start: a*\na: b*\nb: c*\nc: "x" | a',
        json_grammar({"type": "array", "minItems": 10**7, "items": {"type": "integer"}}),
    ],
)
def test_a_grammar_that_grows_with_its_text_costs_others_no_answer(grammar: str) -> None:
    free = [request(f"free{i}", PROMPT[i:], max_tokens=40) for i in range(2)]
    heavy = [
        request("heavy", PROMPT, grammar=grammar, max_tokens=60),
        request("sampled", PROMPT, grammar=grammar, max_tokens=60, temperature=1.5, seed=2),
    ]
    found = run(make_engine(), [*free, *heavy])
    alone = answers(make_engine(), free)
    assert {name: tokens_of(found[name]) for name in alone} == alone
    for asked in heavy:
        assert found[asked.request_id][-1].chunk.finish_reason in {"stop", "length", "grammar"}
