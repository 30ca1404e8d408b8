"""Suffix drafts in the engine: they change no answer, and count for nobody else."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from distributions import chi_square, law_of_tokens
from engines import TOKENIZER, engine_of, request, run, served, tokens_of
from grammars import json_grammar
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pools import attached, pool_engine, serving
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.kv_cache import BLOCK_SIZE
from paceline.actors.engine.request import SUFFIX, GenerationRequest
from paceline.actors.speculation.costs import DraftCosts, StepCosts
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pool.draft_ahead import DraftAheadMode
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.speculation.suffix.arm import SuffixArm
from paceline.actors.speculation.suffix.estimates import (
    NUM_BINS,
    SuffixEstimate,
    bin_of,
    choose_lengths,
    choose_ragged_lengths,
)
from paceline.actors.speculation.suffix.store import SuffixStore

FEW_POSITIONS = 9 * BLOCK_SIZE  # two requests begin, and only one can end
PROMPT = TOKENIZER.encode("Ann has 12 apples. She buys 30 more.", add_special_tokens=False)


def cheap_policy() -> GoodputPolicy:
    """Verification of further tokens at next to no cost."""
    target = {(b, t): 1e-2 + 1e-6 * b * t for b in (1, 4, 300) for t in (1, 2, 5, 9)}
    return GoodputPolicy(StepCosts(target), DraftCosts({(1, 1): 1e-3, (300, 1): 1e-3}), 8)


def steady() -> Callable[[], float]:
    """A clock that no load on this machine disturbs."""
    ticks = itertools.count()
    return lambda: next(ticks) * 2e-3


def suffix_engine(arm: SuffixArm | None, drafts: bool = False, **more: Any) -> Engine:
    """An engine with suffix drafts, and perhaps the draft a."""
    vocab, init = more.pop("vocab", 300), more.pop("init", {})
    target = served(tiny_llama(1, vocab=vocab, **init))
    own = [{"a": served(tiny_llama(2, layers=1, vocab=vocab))}] if drafts else []
    return engine_of(
        target, own, k=None, policy=cheap_policy(), suffixes=arm, clock=steady(), **more
    )


def shared_arm() -> SuffixArm:
    return SuffixArm(SuffixStore(100.0, lambda: 0.0))


def answers(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(engine, requests).items()}


def drafted(outputs: list[StepOutput]) -> int:
    stats = outputs[-1].chunk.speculative
    assert stats is not None
    return stats.num_suffix_tokens


def known(outputs: list[StepOutput]) -> bool:
    """Whether an answer was among the recorded ones; in themselves they repeat next to nothing."""
    stats = outputs[-1].chunk.speculative
    assert stats is not None
    assert not 2 < stats.num_accepted_suffix_tokens < 8
    return stats.num_accepted_suffix_tokens >= 8


GRAMMARS = {
    "free": "",
    "words": LLMatcher.grammar_from_regex("(e|o|en|on){20,40}"),
    "list": json_grammar({"type": "array", "items": {"enum": ["one", 12, None]}, "maxItems": 9}),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seeded": {"temperature": 1.1, "seed": 6},
    "penalised": {"frequency_penalty": 0.3, "logit_bias": ((9, 3.0),)},
}


def asked_for() -> list[GenerationRequest]:
    return [
        request(f"{name} {kind}", PROMPT[i:], grammar=grammar, max_tokens=50, **own)
        for i, (kind, own) in enumerate(SAMPLINGS.items())
        for name, grammar in GRAMMARS.items()
    ]


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "no drafts"])
def test_answers_are_the_same_with_and_without(drafts: bool) -> None:
    asked = asked_for()
    plain = answers(suffix_engine(None, drafts=drafts), asked)
    for arm in (SuffixArm(None), shared_arm()):
        engine = suffix_engine(arm, drafts=drafts, max_num_seqs=8)
        assert answers(engine, asked) == plain
        assert answers(engine, asked) == plain  # from what is recorded by now
        ((tokens, taken),) = engine.draft_runner.round_stats.suffixes.values()
        assert 0 < taken < tokens


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "no drafts"])
def test_preempted_requests_answer_the_same(drafts: bool) -> None:
    """With blocks for two at first, and for one to its end."""
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.1, "seed": 6}, {}]
    asked = [
        request(f"r{i}", PROMPT[i : i + 20], max_tokens=60 + i, ignore_eos=True, **own)
        for i, own in enumerate(samplings)
    ]
    plain = answers(suffix_engine(None), asked)
    engine = suffix_engine(shared_arm(), drafts=drafts, kv_positions=FEW_POSITIONS)
    for _ in range(3):
        before = engine.preemptions
        assert answers(engine, asked) == plain
        assert engine.preemptions > before
    ((_, taken),) = engine.draft_runner.round_stats.suffixes.values()
    assert taken > 50
    assert engine.kv_blocks[0] == engine.kv_blocks[1]


@pytest.mark.parametrize("at", [1, 7, 20])
def test_a_resumed_answer_is_the_undisturbed_one(at: int) -> None:
    """By a replica that knows nothing of it, and by one that recorded the whole answer before."""
    asked = asked_for()
    whole = run(suffix_engine(None), asked)
    engine = suffix_engine(shared_arm(), drafts=True)
    for _ in range(2):
        resumed = []
        for one in asked:
            seen = whole[one.request_id][:at]
            sent, text = tuple(tokens_of(seen)), "".join(o.chunk.text for o in seen)
            resumed.append(replace(one, output_token_ids=sent, sent_chars=len(text), attempt=1))
        found = run(engine, resumed)
        for one, again in zip(asked, resumed, strict=True):
            rest = tokens_of(found[again.run_id])
            assert [*again.output_token_ids, *rest] == tokens_of(whole[one.request_id])
        assert answers(engine, asked) == {name: tokens_of(own) for name, own in whole.items()}
    assert sum(drafted(outputs) for outputs in found.values()) > 50


@pytest.mark.parametrize("draft_ahead", ["off", "on"])
def test_beside_a_pool_answers_are_the_same(draft_ahead: DraftAheadMode) -> None:
    """A row whose suffix is drafted sends its draft no request, and is ahead of it afterwards."""
    asked = asked_for()
    plain = answers(suffix_engine(None), asked)
    with serving(("a",), draft_ahead=draft_ahead) as servers:
        proposer = attached(servers)
        own: dict[str, Any] = {"policy": cheap_policy(), "clock": steady()}
        engine = pool_engine(proposer, k=None, suffixes=shared_arm(), **own)
        for _ in range(3):
            assert answers(engine, asked) == plain
        # The policy finds the draft not worth its time; with a k of their own requests draft by it.
        fixed = [replace(own, num_speculative_tokens=3) for own in asked]
        assert answers(engine, fixed) == plain
        assert proposer.stats()["a"]["lost"] == 0
    counts = engine.draft_runner.round_stats
    assert counts.suffixes["sql"][1] > 50
    assert sum(version.accepted_tokens for version in counts.versions.values()) > 0


@pytest.mark.parametrize("seeded", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sampled_answers_keep_the_target_distribution(seeded: bool) -> None:
    """Chi-square over 2,000 answers of four tokens behind a prompt that repeats itself."""
    vocab, count, prompt, temperature = 7, 2000, [3, 5, 4, 3, 5], 1.2
    init = {"initializer_range": 0.5}
    arm = shared_arm()
    engine = suffix_engine(arm, vocab=vocab, init=init, eos=-1, max_num_seqs=256, seed=5)
    common: dict[str, Any] = {"max_tokens": 4, "temperature": temperature}
    asked = [
        request(f"r{i}", prompt, seed=i if seeded else None, draft=("a", "none")[i % 2], **common)
        for i in range(count)
    ]
    drawn = Counter(tuple(tokens[:3]) for tokens in answers(engine, asked).values())
    model = tiny_llama(1, vocab=vocab, **init)
    distribution = law_of_tokens(model, prompt, 3, temperature)
    ((tokens, taken),) = engine.draft_runner.round_stats.suffixes.values()
    assert tokens > count / 2
    assert 0.02 < taken / tokens < 0.98
    assert chi_square(drawn, distribution) > 1e-3


def test_a_repeated_answer_takes_few_rounds_and_counts_for_no_draft() -> None:
    engine = suffix_engine(shared_arm(), eos=-1)
    first = run(engine, [request("r0", PROMPT, max_tokens=40)])["r0"]
    again = run(engine, [request("r1", PROMPT, max_tokens=40)])["r1"]
    assert tokens_of(again) == tokens_of(first)
    assert len(again) < len(first) / 2
    stats, record = again[-1].chunk.speculative, again[-1].record
    assert stats is not None
    assert stats.num_accepted_suffix_tokens > 20
    assert (stats.num_draft_tokens, stats.num_spec_steps) == (0, 0)
    assert again[-1].outcome is None
    assert record is not None
    assert (record.draft_token_ids == -1).all()
    assert (record.accepted == -1).all()
    assert np.isnan(record.draft_logprobs).all()
    counts = engine.draft_runner.round_stats
    assert counts.suffixes["sql"][1] >= stats.num_accepted_suffix_tokens
    assert not counts.versions


def test_beside_a_draft_each_counts_its_own_tokens() -> None:
    engine = suffix_engine(shared_arm(), drafts=True, eos=-1)
    for i in range(6):
        outputs = run(engine, [request(f"r{i}", PROMPT[i // 2 :], max_tokens=40)])[f"r{i}"]
        stats, record, outcome = (
            outputs[-1].chunk.speculative,
            outputs[-1].record,
            outputs[-1].outcome,
        )
        assert stats is not None
        assert record is not None
        assert outcome is not None
        assert (record.accepted == 1).sum() == stats.num_accepted_draft_tokens
        assert (record.accepted >= 0).sum() <= stats.num_draft_tokens
        assert outcome.rounds == stats.num_spec_steps
        sent = [each for o in outputs for each in o.chunk.suffix_rounds]
        sums = tuple(map(sum, zip(*sent, strict=True))) if sent else (0, 0)
        assert sums == (stats.num_suffix_tokens, stats.num_accepted_suffix_tokens)
        made = len(outputs) + stats.num_accepted_draft_tokens + stats.num_accepted_suffix_tokens
        assert made - stats.num_cut_rounds == len(tokens_of(outputs)) == 40
    counts = engine.draft_runner.round_stats
    (own,) = counts.versions.values()
    assert own.draft_tokens > 0
    assert counts.suffixes["sql"][1] > 20


@pytest.mark.parametrize("fields", [{"draft": "off"}, {"num_speculative_tokens": 0}])
def test_a_request_without_speculation_has_no_suffix_drafts(fields: dict[str, Any]) -> None:
    engine = suffix_engine(shared_arm(), eos=-1)
    run(engine, [request("r0", PROMPT, max_tokens=40)])
    outputs = run(engine, [request("r1", PROMPT, max_tokens=40, **fields)])["r1"]
    assert drafted(outputs) == 0
    assert len(outputs) == 40


def test_a_request_with_a_number_of_its_own_drafts_by_its_draft_alone() -> None:
    engine = suffix_engine(shared_arm(), drafts=True, eos=-1)
    run(engine, [request("r0", PROMPT, max_tokens=40)])
    asked = request("r1", PROMPT, max_tokens=40, num_speculative_tokens=3)
    outputs = run(engine, [asked])["r1"]
    stats = outputs[-1].chunk.speculative
    assert stats is not None
    # neither with the prompt, nor where one token is left
    assert (drafted(outputs), stats.num_spec_steps) == (0, len(outputs) - 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"recorded": False},
        {"background": True},
        {"topic": "math"},
        {"cache_salt": "acme"},
    ],
)
def test_an_answer_that_is_not_shared_drafts_for_no_other(fields: dict[str, Any]) -> None:
    engine = suffix_engine(shared_arm(), eos=-1)
    run(engine, [request("r0", PROMPT, max_tokens=14, **fields)])
    assert not known(run(engine, [request("r1", PROMPT, max_tokens=14, store=False)])["r1"])
    run(engine, [request("r2", PROMPT, max_tokens=14)])
    assert known(run(engine, [request("r3", PROMPT, max_tokens=14)])["r3"])


def test_an_answer_that_is_not_replayed_drafts_for_others_and_leaves_no_record() -> None:
    engine = suffix_engine(shared_arm(), eos=-1)
    first = run(engine, [request("r0", PROMPT, max_tokens=14, replayed=False)])["r0"]
    assert first[-1].record is None
    assert known(run(engine, [request("r1", PROMPT, max_tokens=14)])["r1"])


def test_initial_weights_draft_by_no_recorded_answer() -> None:
    engine = suffix_engine(shared_arm(), drafts=True, eos=-1)
    run(engine, [request("r0", PROMPT, max_tokens=14)])
    frozen = request("r1", PROMPT, max_tokens=14, draft="a@0", store=False)
    assert not known(run(engine, [frozen])["r1"])
    assert known(run(engine, [request("r2", PROMPT, max_tokens=14, draft="a")])["r2"])


@pytest.mark.parametrize(
    "purge",
    [
        lambda store: store.remove("r0", None),
        lambda store: store.remove(None, "sql"),
        lambda store: store.remove(None, None),
    ],
)
def test_a_purge_reaches_the_recorded_answers(purge: Callable[[SuffixStore], int]) -> None:
    arm = shared_arm()
    engine = suffix_engine(arm, eos=-1)
    run(engine, [request("r0", PROMPT, max_tokens=14)])
    assert arm.store is not None
    assert arm.store.remove("none", "sql") == arm.store.remove("r0", "math") == 0
    assert purge(arm.store) == 1
    assert not known(run(engine, [request("r1", PROMPT, max_tokens=14)])["r1"])
    assert known(run(engine, [request("r2", PROMPT, max_tokens=14)])["r2"])


@pytest.mark.parametrize("topic", [None, "sql", "math"])
def test_a_purge_reaches_an_answer_that_is_not_there_yet(topic: str | None) -> None:
    arm = shared_arm()
    engine = suffix_engine(arm, eos=-1)
    engine.add(request("r0", PROMPT, max_tokens=14))
    engine.step()
    assert arm.store is not None
    assert arm.store.remove("r0", topic) == 0
    run(engine)
    assert known(run(engine, [request("r1", PROMPT, max_tokens=14)])["r1"]) == (topic == "math")


def test_retention_reaches_the_recorded_answers() -> None:
    now = 0.0
    store = SuffixStore(10.0, lambda: now)
    store.add("sql", "", "r0", [1, 2, 3])
    now = 9.0
    assert store.expire() == 0
    store.add("sql", "", "r1", [1, 2, 4])
    now = 11.0
    assert store.expire() == 1
    assert store.remove("r0", None) == 0
    now = 20.0
    assert store.expire() == 1
    assert store.num_tokens == 0


def test_the_tokens_of_a_suffix_are_named_but_not_those_that_were_rejected() -> None:
    engine = suffix_engine(shared_arm(), vocab=7, init={"initializer_range": 0.5}, eos=-1)
    asked = [
        request(f"r{i}", [3, 5, 4], max_tokens=30, token_sources=True, temperature=1.2)
        for i in range(6)
    ]
    kinds: Counter[str] = Counter()
    for one in asked:
        for output in run(engine, [one])[one.request_id]:
            for source in output.chunk.token_sources or ():
                kinds[source.kind] += 1
                assert source.draft == (None if source.kind == "plain" else SUFFIX)
                assert source.weight_version is None
                assert source.rejected_token_id is None
                assert (source.acceptance_probability is not None) == (source.kind == "accepted")
    assert kinds["recovered"] > 5
    assert kinds["accepted"] > 5


@pytest.mark.parametrize("part", ["_predict", "record"])
def test_a_failure_of_the_arm_costs_no_answer(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answers(suffix_engine(None, eos=-1), [request("r", PROMPT, max_tokens=20)])

    def broken(*_: object) -> None:
        raise MemoryError

    arm = SuffixArm(None)
    monkeypatch.setattr(arm, part, broken)
    engine = suffix_engine(arm, eos=-1)
    outputs = run(engine, [request("r", PROMPT, max_tokens=20)], draft_failures=True)
    assert {"r": tokens_of(outputs["r"])} == plain
    assert engine.draft_failures == 1


def test_drafts_that_suffixes_cannot_join_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answers(suffix_engine(None, eos=-1), [request("r", PROMPT, max_tokens=20)])

    def broken(*_: object) -> Proposal:
        raise IndexError

    monkeypatch.setattr(Proposal, "with_suffixes", broken)
    engine = suffix_engine(SuffixArm(None), eos=-1)
    outputs = run(engine, [request("r", PROMPT, max_tokens=20)], draft_failures=True)
    assert {"r": tokens_of(outputs["r"])} == plain
    assert engine.draft_failures > 1


def test_acceptance_is_learnt_from_what_was_never_drafted() -> None:
    estimate, good, bad = SuffixEstimate(), bin_of(4, 1, 1), bin_of(16, 5, 5)
    assert estimate.acceptance[good] < estimate.acceptance[bad]
    for _ in range(60):
        estimate.observe([good, good], [1, 2], [1, 2, 3])
        estimate.observe([bad, good], [1, 2], [7])
    assert estimate.acceptance[good] > 0.95
    assert estimate.acceptance[bad] < 0.1
    assert estimate.expected_accepted([good, bad])[1:] == pytest.approx([0.97, 1.04], abs=0.06)
    heir = SuffixEstimate(estimate)
    assert heir.acceptance == estimate.acceptance
    for _ in range(30):
        heir.observe([good], [1], [2])
    assert heir.acceptance[good] < 0.2
    assert len(heir.acceptance) == NUM_BINS


@pytest.mark.parametrize(
    ("expected", "drafted", "row_s", "draft_s", "chosen"),
    [
        ({0: [0, 0.9, 1.7, 2.4]}, [0.0], 0.1, 0.0, {0: 3}),
        ({0: [0, 0.9, 1.0, 1.05]}, [0.0], 0.1, 0.0, {0: 1}),
        ({0: [0, 0.1, 0.11, 0.11]}, [0.0], 0.1, 0.0, {}),
        # in place of a draft, or not
        ({0: [0, 0.9, 1.7, 2.4]}, [1.5], 0.1, 0.3, {0: 3}),
        ({0: [0, 0.5, 0.6, 0.6]}, [1.5], 0.1, 0.3, {}),
        # in one batch with it
        ({0: [0, 0.99, 1.9, 2.8]}, [0.2, 2.0], 0.02, 0.3, {0: 3}),
        # in place of the only draft that promises more, so that no model drafts
        ({0: [0, 0.9, 1.7], 1: [0, 0.9, 1.7]}, [0.2, 2.0], 0.1, 0.9, {0: 2, 1: 2}),
        # and not if another row drafts in any case
        ({0: [0, 0.9, 1.7]}, [2.0, 2.0], 0.02, 0.9, {}),
        # one row of many is not worth columns for all
        ({3: [0, 0.9, 1.7, 2.4]}, [0.0] * 8, 0.1, 0.0, {}),
        ({i: [0, 0.9, 1.8] for i in range(8)}, [0.0] * 8, 0.05, 0.0, dict.fromkeys(range(8), 2)),
    ],
)
def test_the_longest_round_is_chosen_that_pays(
    expected: dict[int, list[float]],
    drafted: list[float],
    row_s: float,
    draft_s: float,
    chosen: dict[int, int],
) -> None:
    def round_s(tokens: int, drafting: Any) -> float:
        columns = max(tokens, 2 if drafting else 0)
        return 1.0 + row_s * len(drafted) * columns + (draft_s if drafting else 0.0)

    assert choose_lengths(expected, drafted, round_s) == chosen


chances = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=3)


@given(
    st.dictionaries(st.integers(0, 3), chances, min_size=1),
    st.lists(st.sampled_from([0.0, 0.3, 1.5]), min_size=4, max_size=8),
    st.floats(0.005, 0.3),
    st.sampled_from([0.0, 0.2]),
)
@settings(deadline=None)
def test_each_row_verifies_what_pays_by_itself(
    reached: dict[int, list[float]], drafted: list[float], token_s: float, draft_s: float
) -> None:
    """Never a loss, and without drafts of a model within a few per cent of the best there is."""
    expected = {i: [0.0, *itertools.accumulate(itertools.accumulate(own, operator.mul))]
                for i, own in reached.items()}  # fmt: skip

    def round_s(tokens: int, drafting: Collection[int]) -> float:
        return 1.0 + token_s * (tokens + 2 * len(drafting)) + (draft_s if drafting else 0.0)

    def goodput(chosen: dict[int, int]) -> float:
        left = [i for i, own in enumerate(drafted) if own and i not in chosen]
        gained = sum(expected[i][n] for i, n in chosen.items()) + sum(drafted[i] for i in left)
        return (len(drafted) + gained) / round_s(sum(chosen.values()), left)

    chosen = choose_ragged_lengths(expected, drafted, round_s)
    assert goodput(chosen) >= goodput({})
    if not any(drafted):
        ways = itertools.product(*(range(len(own)) for own in expected.values()))
        best = max(goodput(dict(zip(expected, way, strict=True))) for way in ways)
        assert goodput(chosen) >= 0.93 * best
    if chosen:
        assert all(0 < n < len(expected[i]) for i, n in chosen.items())


@pytest.mark.parametrize("tokens", [{0: [5, 6, 7]}, {2: [4], 0: [8, 9]}])
def test_alone_they_make_the_proposal_that_they_make_beside_padding(
    tokens: dict[int, list[int]],
) -> None:
    whole, parts = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1)
    padding = Proposal(whole, whole[:, 0], parts, whole[..., None], parts[..., None])
    found = Proposal.empty(3, torch.device("cpu")).with_suffixes(tokens)
    expected = padding.with_suffixes(tokens)
    for field in fields(Proposal):
        own, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert own.dtype == other.dtype
            own, other = own.tolist(), other.tolist()
        assert own == other
