"""Drafts whose vocabulary is padded to another size than the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of, make_engine, request, run, served, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import VOCAB, attached, pool_engine, serving
from tiny_models import save_tiny, tiny_llama, tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.compatibility import ModelError, check_models
from paceline.actors.engine.cuda_graphs import GraphedDecoder
from paceline.actors.engine.decoders import ModuleDecoder
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.vocabulary import known_ids, resize_logits
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal

SMALL, LARGE = 300, 320
SIZES = [(SMALL, LARGE), (LARGE, SMALL)]  # draft, target
DRAFTS = ("a", "b", "c", "d", "e")


def llama(seed: int, vocab: int, **more: Any) -> Any:
    """Its most probable tokens are those that the other vocabulary lacks."""
    model = tiny_llama(seed, vocab=vocab, **more)
    model.model.embed_tokens.weight.data[SMALL:] *= 2
    return served(model)


def gpt2(seed: int, vocab: int, *, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=128,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    model = GPT2LMHeadModel(config).eval()
    model.transformer.wte.weight.data[SMALL:] *= 2
    return served(model)


def speculating(make: Any, draft: int, target: int) -> Engine:
    """Twins of the target's seed and others, fused and by module, of both sizes, in one engine."""
    groups = [
        {"a": llama(1, draft), "b": llama(2, draft)},
        {"c": gpt2(1, draft), "d": gpt2(2, draft)},
        {"e": llama(3, target, layers=1)},
    ]
    speculative = engine_of(make(1, target), groups, max_num_seqs=len(DRAFTS))
    kinds = {type(runner_of(speculative, name).decoder) for name in DRAFTS}
    assert kinds == {FusedDecoder, ModuleDecoder}
    return speculative


def runner_of(engine: Engine, draft: str) -> ModelRunner:
    runner: ModelRunner = engine.draft_runner._proposer._stacks[draft].runner  # type: ignore[attr-defined]
    return runner


def proposals_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """What the engine's drafts will propose, as it is proposed."""
    proposer: Any = engine.draft_runner._proposer
    found, propose = [], proposer.propose

    def noted(rows: Any) -> Proposal:
        found.append(propose(rows))
        return found[-1]

    monkeypatch.setattr(proposer, "propose", noted)
    return found


def asked(prompts: Mapping[str, list[int]], draft: bool, **fields: Any) -> list[Any]:
    fields = {"max_tokens": 16, "ignore_eos": True} | fields
    return [
        request(name, prompt, draft=name if draft else "off", **fields)
        for name, prompt in prompts.items()
    ]


RULES: list[dict[str, Any]] = [
    {},
    {"logit_bias": ((SMALL - 1, 4.0), (SMALL - 2, 100.0)), "presence_penalty": 2.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 4, "min_p": 0.01},
    {"top_k": 5, "top_p": 0.9, "logprobs": 2},
]
BEYOND: dict[str, Any] = {"logit_bias": ((LARGE - 3, 20.0), (7, 19.0)), "frequency_penalty": 1.0}


@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("draft", "target"), SIZES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_answers_are_those_without_drafts(make: Any, draft: int, target: int, data: Any) -> None:
    token = st.integers(0, target - 1)
    drawn = st.lists(token, min_size=1, max_size=24)
    prompts = {name: data.draw(drawn, label=name) for name in DRAFTS}
    rules = data.draw(st.sampled_from(RULES + [BEYOND] * (target == LARGE)))
    fields = {"temperature": data.draw(st.sampled_from([0.0, 0.9])), "seed": 5, **rules}
    plain = run(engine_of(make(1, target), [], max_num_seqs=5), asked(prompts, False, **fields))
    speculative = speculating(make, draft, target)
    with pytest.MonkeyPatch.context() as patch:
        proposals = proposals_of(speculative, patch)
        found = run(speculative, asked(prompts, True, **fields))
    assert {n: tokens_of(o) for n, o in found.items()} == {
        n: tokens_of(o) for n, o in plain.items()
    }
    assert sum(int(p.num_drafted.sum()) for p in proposals) > 0
    for proposal in proposals:
        assert int(proposal.token_ids.max()) < target
        assert int(proposal.support_ids.max()) < target
        steps = torch.arange(proposal.token_ids.shape[1])
        within = steps < proposal.num_drafted[:, None]
        assert bool((proposal.token_probs[within] > 0).all())


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(("draft", "target"), SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_either_vocabulary_lacks_is_never_proposed(
    make: Any, draft: int, target: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculative = engine_of(make(1, target), [{"a": make(2, draft)}], support=400)
    proposals = proposals_of(speculative, monkeypatch)
    rules = BEYOND if target == LARGE else {}
    prompt = [5, target - 1, 9, target - 2]
    run(speculative, asked({"a": prompt}, True, temperature=temperature, **rules))
    assert proposals
    for proposal in proposals:
        assert int(proposal.token_ids.max()) < SMALL
        assert int(proposal.support_ids[proposal.support_probs > 0].max()) < SMALL
        whole = proposal.support_probs[proposal.num_drafted > 0, 0].sum(-1)
        assert temperature == 0.0 or torch.allclose(whole, torch.ones_like(whole))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_token_that_draft_and_tokenizer_lack_is_answered(temperature: float) -> None:
    """The target may emit what it is padded with: drafts read on, and it has no text."""
    beyond = LARGE - 1
    for name in (*DRAFTS, "off"):
        sampling = {"temperature": temperature, "logit_bias": ((beyond, 100.0),), "max_tokens": 9}
        outputs = run(
            speculating(llama, SMALL, LARGE),
            [request("r", [beyond, 5, 6], draft=name, stop=("x",), **sampling)],
        )["r"]
        assert tokens_of(outputs) == [beyond] * 9
        assert "".join(output.chunk.text for output in outputs) == ""
        assert outputs[-1].chunk.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab", [VOCAB - 20, VOCAB + 20])
def test_experts_in_a_pool_may_be_padded_to_another_size(vocab: int, temperature: float) -> None:
    prompts = {"r": [VOCAB - 1, 5, VOCAB - 2], "s": [7, VOCAB - 3]}
    rules = {"logit_bias": ((VOCAB - 4, 6.0), (9, 6.0)), "frequency_penalty": 1.0}
    asks = [
        request(name, prompt, ignore_eos=True, temperature=temperature, seed=2, **rules)
        for name, prompt in prompts.items()
    ]
    plain = run(make_engine(), [replace(ask, draft="off") for ask in asks])
    with serving(("a",), vocab=vocab) as servers:
        proposer = attached(servers)
        found = run(pool_engine(proposer), asks)
        assert proposer.stats()["a"]["lost"] == 0
    for name in prompts:
        assert tokens_of(found[name]) == tokens_of(plain[name])
        stats = found[name][-1].chunk.speculative
        assert stats is not None
        assert stats.num_draft_tokens > 0


def recorded_by_hand(run: Any) -> Any:
    """A recording as a graph's: it runs again on its fixed tensors."""
    results = run()

    def again() -> None:
        for own, new in zip(results, run(), strict=True):
            own.copy_(new)

    return again, results


recorded_by_hand.reset = lambda: None  # type: ignore[attr-defined]
recorded_by_hand.max_result_bytes = 1 << 28  # type: ignore[attr-defined]


@pytest.mark.parametrize(("draft", "target"), SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_drafts_propose_the_same(draft: int, target: int, temperature: float) -> None:
    prompts = {"a": [3, target - 1, 8], "b": [target - 2, 8, 9, 10]}
    answers = []
    for recorded in (False, True):
        drafts = {"a": llama(1, draft), "b": llama(2, draft)}
        speculative = engine_of(llama(1, target), [drafts])
        runner = runner_of(speculative, "a")
        if recorded:
            assert isinstance(runner.decoder, FusedDecoder)
            runner.decoder = GraphedDecoder(runner.decoder, recorded_by_hand, 5)  # type: ignore[arg-type]
        fields = {"temperature": temperature, "seed": 3}
        answers.append(run(speculative, asked(prompts, True, **fields)))
        if recorded:
            assert runner.decoder.num_graphs > 0  # type: ignore[attr-defined]
    plain, replayed = answers
    for name in prompts:
        assert tokens_of(plain[name]) == tokens_of(replayed[name])
        assert plain[name][-1].chunk.speculative == replayed[name][-1].chunk.speculative


def test_a_twin_with_another_padding_is_accepted_as_ever() -> None:
    """Padding costs no acceptance: the draft is the target, but for its further rows."""
    target = tiny_llama(1, vocab=SMALL)
    draft = tiny_llama(1, vocab=LARGE)
    state = {k: v.clone() for k, v in target.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], 9 * torch.ones(LARGE - SMALL, 32)])
    draft.load_state_dict(state)
    speculative = engine_of(served(target), [{"a": served(draft)}])
    ask = request("r", [1, 5, 9], ignore_eos=True)
    stats = run(speculative, [ask])["r"][-1].chunk.speculative
    assert stats is not None
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


@given(st.integers(1, 9), st.integers(1, 9))
def test_resized_logits_give_the_same_odds(own: int, wanted: int) -> None:
    logits = torch.randn(2, 3, own)
    found = resize_logits(logits, wanted)
    assert found.shape == (2, 3, wanted)
    common = min(own, wanted)
    assert torch.equal(found[..., :common], logits[..., :common])
    expected = torch.softmax(logits[..., :common], -1)
    assert torch.allclose(torch.softmax(found, -1)[..., :common], expected)
    ids = torch.arange(wanted)
    assert known_ids(ids, own).tolist() == [i if i < own else 0 for i in range(wanted)]


def test_what_differs_by_padding_alone_is_served(tmp_path: Path) -> None:
    small, large = save_tiny(tmp_path / "s", 1), save_tiny(tmp_path / "l", 1, vocab=LARGE)
    bare = save_tiny(tmp_path / "bare", 2, vocab=LARGE, tokenizer=False)
    check_models(small, {"general": large, "sql": bare})
    check_models(large, {"general": small})
    for target, draft in ((small, large), (large, small), (small, bare)):
        own = TargetSettings(
            str(target), {"general": str(draft)}, dtype="float32", num_threads=1, max_num_seqs=2
        )
        engine, _, _ = build_engine(own)
        asks = [request("r", [1, 5], draft="general", max_tokens=4)]
        assert run(engine, asks)["r"]


def test_a_vocabulary_that_lacks_a_token_is_refused(tmp_path: Path) -> None:
    largest = max(tiny_tokenizer().get_vocab().values())
    target = save_tiny(tmp_path / "t", 1, vocab=LARGE)
    fits = save_tiny(tmp_path / "fits", 1, vocab=largest + 1, tokenizer=False)
    short = save_tiny(tmp_path / "short", 1, vocab=largest, tokenizer=False)
    check_models(target, {"general": fits})
    message = (
        f"draft sql: vocabulary of {largest} tokens, the target has {LARGE}; "
        f"the draft's lacks token {largest} of the tokenizer"
    )
    with pytest.raises(ModelError) as refused:
        check_models(target, {"general": fits, "sql": short})
    assert str(refused.value) == message
    tiny_tokenizer().save_pretrained(short)
    with pytest.raises(ModelError, match=f"the target's lacks token {largest} of the tokenizer"):
        check_models(short, {"general": fits})


@pytest.mark.parametrize(("draft", "target"), SIZES)
def test_an_experts_drafter_takes_any_id_of_the_target(draft: int, target: int) -> None:
    speculative = engine_of(llama(1, target), [{"a": llama(2, draft)}])
    stack: Any = speculative.draft_runner._proposer._stacks["a"]  # type: ignore[attr-defined]
    tokens = (target - 1, 4, target - 1)
    row = DraftRow("r", "a", tokens, 0, 4, SamplingParams(max_tokens=9, temperature=0.0))
    proposal = stack.propose([row], 16, torch.Generator())
    assert int(proposal.num_drafted[0]) == 4
    assert int(proposal.token_ids.max()) < SMALL
