"""Log-probabilities of prompts: exact, in chunks, and never skipped by a cached prefix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines import TOKENIZER, make_engine, request, run, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_llama
from unit.engine.test_not_finite import BROKEN, engine, llama

from paceline.actors.engine import engine as engine_module
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.request import (
    FINISH_LENGTH,
    FINISH_NOT_FINITE,
    GenerationChunk,
    TokenLogprob,
    merge_chunks,
)
from paceline.deploy.api.failover import Failover, FailoverPolicy, Failure

LONG = TOKENIZER.encode("Ann has 12 apples. She buys 30 more. SELECT name FROM people;" * 2)[:60]
SCORE = {"max_tokens": 0, "prompt_logprobs": 2}


def whole(outputs: list[StepOutput]) -> GenerationChunk:
    return merge_chunks([output.chunk for output in outputs])


def scored(outputs: list[StepOutput]) -> tuple[TokenLogprob, ...]:
    """The entries, which come once."""
    found = [o.chunk.prompt_logprobs for o in outputs if o.chunk.prompt_logprobs is not None]
    assert len(found) == 1
    return found[0]


def expected(prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T - 1, V]`` by transformers' own forward."""
    with torch.inference_mode():
        logits = tiny_llama(1)(torch.tensor([prompt])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_they_are_those_of_one_forward_of_the_whole_prompt(chunk: int) -> None:
    outputs = run(make_engine(prefill_chunk=chunk), [request("r", LONG, **SCORE)])["r"]
    law, entries = expected(LONG), scored(outputs)
    assert len(entries) == len(LONG) - 1
    for row, token, entry in zip(law, LONG[1:], entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(2)
        assert [i for i, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.rank == int((row >= row[token]).sum())


def test_a_prompt_alone_takes_no_token_and_leaves_no_record() -> None:
    served = make_engine()
    (output,) = run(served, [request("r", LONG, **SCORE)])["r"]
    assert (output.chunk.finish_reason, output.chunk.token_ids) == (FINISH_LENGTH, ())
    assert (output.record, output.outcome) == (None, None)
    assert served.num_running == 0
    assert served.kv_blocks[0] == served.kv_blocks[1]


def test_a_single_token_has_nothing_before_it() -> None:
    assert scored(run(make_engine(), [request("r", [7], **SCORE)])["r"]) == ()


def test_the_answer_after_them_is_as_without_them() -> None:
    """The first chunk has them; log-probabilities of the answer go on from there."""
    fields = {"ignore_eos": True, "logprobs": 1, "max_tokens": 12}
    plain = whole(run(make_engine(), [request("r", LONG, **fields)])["r"])
    outputs = run(make_engine(), [request("r", LONG, prompt_logprobs=1, **fields)])["r"]
    assert outputs[0].chunk.prompt_logprobs is not None
    assert whole(outputs).token_ids == plain.token_ids
    assert whole(outputs).logprobs == plain.logprobs
    both = [*LONG, *plain.token_ids]
    again = scored(run(make_engine(), [request("s", both, **SCORE)])["s"])[len(LONG) - 1 :]
    told = [entry.logprob for entry in plain.logprobs or ()]
    assert [entry.logprob for entry in again] == pytest.approx(told, abs=1e-4)


def test_a_cached_prefix_skips_no_position_and_scoring_leaves_one_for_others() -> None:
    served = make_engine()
    first = scored(run(served, [request("r", LONG, **SCORE)])["r"])
    plain = run(served, [request("s", LONG)])["s"][-1].chunk
    assert plain.num_cached_tokens == (len(LONG) - 1) // 16 * 16 > 0
    outputs = run(served, [request("t", LONG, **SCORE)])["t"]
    assert outputs[-1].chunk.num_cached_tokens == 0
    assert scored(outputs) == first


@given(
    lengths=st.lists(st.integers(2, 50), min_size=3, max_size=5),
    chunk=st.integers(1, 20),
    blocks=st.integers(6, 9),
)
@settings(max_examples=15)
def test_they_survive_preemption(lengths: list[int], chunk: int, blocks: int) -> None:
    """What was computed before a request lost its memory is not computed, or lost, again."""
    prompts = [[5 + i, *LONG[: length - 1]] for i, length in enumerate(lengths)]
    fields = {"prompt_logprobs": 1, "max_tokens": 30, "ignore_eos": True}
    asked = [request(f"r{i}", prompt, **fields) for i, prompt in enumerate(prompts)]
    crowded = run(make_engine(kv_positions=16 * blocks, prefill_chunk=chunk), asked)
    plenty = make_engine(prefill_chunk=chunk)
    for one, prompt in zip(asked, prompts, strict=True):
        alone = run(plenty, [one])[one.request_id]
        found = crowded[one.request_id]
        assert tokens_of(found) == tokens_of(alone)
        values = [[e.logprob for e in scored(outputs)] for outputs in (found, alone)]
        assert len(values[0]) == len(prompt) - 1
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_preemption_in_the_middle_of_a_prompt_goes_on_behind_what_is_known() -> None:
    served = make_engine(prefill_chunk=8)
    served.add(request("r", LONG, **SCORE))
    for _ in range(5):
        assert served.step() == []
    sequence = served._running["r"]
    known = len(sequence._prompt_logprobs or ())
    served._scheduler._preempt(sequence)
    positions = watch(served)
    outputs = run(served)["r"]
    assert min(positions) == known // 16 * 16 > 0  # whole blocks that it left in the cache
    undisturbed = scored(run(make_engine(), [request("s", LONG, **SCORE)])["s"])
    assert [e.logprob for e in scored(outputs)] == pytest.approx(
        [e.logprob for e in undisturbed], abs=1e-4
    )


def watch(served: Engine) -> list[int]:
    """Positions at which later forwards of the target start."""
    starts: list[int] = []
    forward = served._runner.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        starts.append(int(arguments[2][0, 0]))
        return forward(*arguments, **options)

    served._runner.forward = watched  # type: ignore[method-assign]
    return starts


def test_the_logits_of_a_long_chunk_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_PROMPT_LOGITS", 300 * 10)
    served = make_engine(prefill_chunk=256)
    starts = watch(served)
    entries = scored(run(served, [request("r", LONG, **SCORE)])["r"])
    assert starts == list(range(0, len(LONG) - 1, 10))
    assert [e.logprob for e in entries] == pytest.approx(
        [float(row[t]) for row, t in zip(expected(LONG), LONG[1:], strict=True)], abs=1e-4
    )


def test_a_prompt_whose_logits_are_not_numbers_fails_alone() -> None:
    target = llama(torch.float32)
    outputs = run(engine(target), [request("bad", BROKEN, **SCORE), request("good", LONG, **SCORE)])
    assert outputs["bad"][-1].chunk.finish_reason == FINISH_NOT_FINITE
    assert outputs["good"][-1].chunk.finish_reason == FINISH_LENGTH
    assert not any(math.isnan(entry.logprob) for entry in scored(outputs["good"]))


def test_another_replica_computes_them_only_if_the_client_has_none() -> None:
    failover = Failover(FailoverPolicy())
    state = failover.start(request("r", LONG, prompt_logprobs=1, max_tokens=9), 0.0)
    state.on_failure(Failure.GONE, 0.0)
    assert state.request.sampling.prompt_logprobs == 1
    entries = (TokenLogprob(-1.0),)
    state.on_chunk(GenerationChunk("a", (9,), prompt_logprobs=entries), 0.0)
    state.on_failure(Failure.GONE, 0.0)
    resumed = state.request
    assert (resumed.sampling.prompt_logprobs, resumed.output_token_ids) == (None, (9,))
    outputs = run(make_engine(), [resumed])[resumed.run_id]
    assert tokens_of(outputs)
    assert all(output.chunk.prompt_logprobs is None for output in outputs)
