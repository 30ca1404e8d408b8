"""Medusa heads: answers equal plain decoding, and right heads are accepted."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import chi_square, law_of_tokens
from engines import DEVICE, MAX_LEN, TOKENIZER, engine_of, request, run, served, tokens_of
from online.head_training import (
    HeadTrainingSettings,
    head_accuracy,
    make_dataset,
    medusa_loss,
    train_heads,
)
from online.heads import (
    HeadsConfig,
    HeadStack,
    MedusaHeads,
    check_hidden,
    load_heads,
    save_heads,
    stacks_of,
)
from tiny_models import save_tiny, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.decoders import ModuleDecoder
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import SwapWeights

PROMPTS = [
    TOKENIZER.encode(text, add_special_tokens=False)
    for text in (
        "SELECT name",
        "Write",
        "a",
        "Ann has 12 apples. She buys 30 more.",
        "List all",
        "x y z",
    )
]
LENGTHS = [30, 5, 12, 40, 1, 23]
K = 3
SIZES = HeadsConfig(K, 32, 300)


def random_state(config: HeadsConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(shape, generator=generator)
        for name, shape in config.shapes().items()
    }


def medusa_engine(
    state: dict[str, torch.Tensor] | None = None,
    config: HeadsConfig = SIZES,
    *,
    vocab: int = 300,
    model: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    """An engine whose draft ``a`` is a set of heads, and ``b`` a model of one layer."""
    target = served(tiny_llama(1, vocab=vocab, **(model or {})))
    state = random_state(config, 3) if state is None else state
    output = target.get_output_embeddings().weight
    drafts = [{"b": served(tiny_llama(2, layers=1, vocab=vocab))}]

    def beside(runner: ModelRunner) -> list[HeadStack]:
        return [HeadStack("a", config, state, output, runner.kv)]

    return engine_of(target, drafts, beside=beside, **more)


@lru_cache(maxsize=1)
def answers() -> list[list[int]]:
    """Greedy answers of plain decoding, longer than any test asks for."""
    asked = [
        request(f"{i}", p, max_tokens=60, ignore_eos=True, num_speculative_tokens=0)
        for i, p in enumerate(PROMPTS)
    ]
    found = run(medusa_engine(), asked)
    return [tokens_of(found[f"{i}"]) for i in range(len(PROMPTS))]


@lru_cache(maxsize=2)
def overfitted(own_output: bool) -> tuple[HeadsConfig, dict[str, torch.Tensor]]:
    """Heads that know the target's answers to these prompts by heart."""
    target = tiny_llama(1)
    config = dataclasses.replace(SIZES, own_output=own_output)
    heads = MedusaHeads(config, target.lm_head.weight)
    dataset = make_dataset(target, list(zip(PROMPTS, answers(), strict=True)), K)
    train_heads(heads, dataset, HeadTrainingSettings(steps=200, positions=64, learning_rate=3e-2))
    assert min(head_accuracy(heads, dataset)) > (0.9 if own_output else 0.15)
    return config, heads.state_dict()


def accepted(outputs: dict[str, Any]) -> tuple[int, int]:
    """(accepted, drafted) tokens over all requests."""
    stats = [own[-1].chunk.speculative for own in outputs.values()]
    return sum(s.num_accepted_draft_tokens for s in stats), sum(s.num_draft_tokens for s in stats)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("kind", ["random", "own", "shared"])
def test_greedy_answers_are_those_of_plain_decoding_in_a_ragged_batch(k: int, kind: str) -> None:
    """Six requests in four rows, beside a draft of the other kind; 7 are more than there are."""
    config, state = (
        (SIZES, random_state(SIZES, 3)) if kind == "random" else overfitted(kind == "own")
    )
    engine = medusa_engine(state, config, k=k)
    asked = [
        request(f"{i}", p, max_tokens=n, ignore_eos=True, draft="b" if i == 1 else "a")
        for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    found = run(engine, asked)
    for i, length in enumerate(LENGTHS):
        assert tokens_of(found[f"{i}"]) == answers()[i][:length], i
    stats = found["3"][-1].chunk.speculative
    assert len(stats.acceptance_histogram) == min(k, K) + 1


def test_heads_trained_on_the_answer_are_accepted_and_random_ones_are_not() -> None:
    config, state = overfitted(True)
    asked = [request(f"{i}", p, max_tokens=40, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    taken, drafted = accepted(run(medusa_engine(state, config, k=K), asked))
    assert taken > 0.9 * drafted > 0
    taken, drafted = accepted(run(medusa_engine(k=K), asked))
    assert taken < 0.2 * drafted


def test_rounds_draft_from_the_start_also_after_a_cached_prompt() -> None:
    """Heads that know the answer: three tokens and the bonus in every round that drafts.

    A prompt that is computed in a round gives one token there.
    """
    config, state = overfitted(True)
    engine = medusa_engine(state, config, k=K)
    prompt = PROMPTS[2] + answers()[2][:16]
    assert len(prompt) == 17  # a block, and the token that is always computed
    asked = request("r", prompt, max_tokens=21, ignore_eos=True)
    for expected in ([1, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 1]):
        outputs = run(engine, [asked])["r"]
        assert [len(o.chunk.token_ids) for o in outputs] == expected
        assert tokens_of(outputs) == answers()[2][16:37]


def test_a_stop_string_and_the_end_of_text_end_the_answer_alike() -> None:
    config, state = overfitted(True)
    answer = answers()[3]
    text = TOKENIZER.decode(answer[:30], skip_special_tokens=True)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    eos = answer[7]
    engine = medusa_engine(state, config, k=K, eos=eos)
    asked = [
        request("stop", PROMPTS[3], max_tokens=30, stop=(stop,), ignore_eos=True),
        request("eos", PROMPTS[3], max_tokens=30),
    ]
    found = run(engine, asked)
    assert "".join(o.chunk.text for o in found["stop"]) == text[: text.index(stop)]
    assert tokens_of(found["eos"]) == answer[: answer.index(eos) + 1]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_drafts_on_and_answers_the_same(prefix_cache: bool) -> None:
    config, state = overfitted(True)
    engine = medusa_engine(state, config, k=K, kv_positions=MAX_LEN, prefix_cache=prefix_cache)
    asked = [request(f"{i}", PROMPTS[i], max_tokens=60, ignore_eos=True) for i in (0, 3, 5)]
    found = run(engine, asked)
    assert engine.preemptions >= 1
    for i in (0, 3, 5):
        assert tokens_of(found[f"{i}"]) == answers()[i]
    taken, drafted = accepted(found)
    assert taken > 0.9 * drafted


def test_a_resumed_request_goes_on_with_the_same_tokens() -> None:
    config, state = overfitted(True)
    asked = request("r", PROMPTS[3], max_tokens=40, ignore_eos=True)
    for at in (1, 9):
        again = dataclasses.replace(asked, output_token_ids=tuple(answers()[3][:at]), attempt=1)
        found = run(medusa_engine(state, config, k=K), [again])["r#1"]
        assert tokens_of(found) == answers()[3][at:40]


def test_a_seed_fixes_the_text_whatever_the_heads_draft() -> None:
    config, state = overfitted(True)
    given = []
    for draft, k, crowd in [("off", 0, 0), ("a", 3, 0), ("a", 1, 3), ("a", 2, 2), ("b", 3, 1)]:
        engine = medusa_engine(state, config)
        others = [request(f"o{i}", PROMPTS[i], temperature=1.0) for i in range(crowd)]
        mine = request(
            "r",
            PROMPTS[3],
            temperature=0.9,
            top_p=0.95,
            frequency_penalty=0.3,
            seed=11,
            draft=draft,
            num_speculative_tokens=k,
            max_tokens=40,
            ignore_eos=True,
        )
        given.append(tokens_of(run(engine, [*others, mine])["r"]))
    assert all(tokens == given[0] for tokens in given)


@pytest.mark.parametrize("kind", [pytest.param("unseeded", marks=pytest.mark.full), "mixed"])
def test_samples_follow_the_target_distribution(kind: str) -> None:
    """Chi-square over 1,500 answers, two tokens a round from heads of a cut support.

    Prompts differ in nothing, so the joint distribution of the first three tokens is the target's.
    """
    vocab, count, prompt, temperature, top_p = 7, 1500, [3, 5], 1.2, 0.9
    model = {"initializer_range": 0.5}
    config = HeadsConfig(2, 32, vocab)
    engine = medusa_engine(
        random_state(config, 4),
        config,
        vocab=vocab,
        model=model,
        max_num_seqs=256,
        eos=-1,
        seed=5,
        support=3,
        prefix_cache=False,
    )
    asked = [
        request(
            f"{i}",
            prompt,
            temperature=temperature,
            top_p=top_p,
            draft=("a", "a", "off", "b")[i % 4],
            num_speculative_tokens=(2, 1, None, 2)[i % 4],
            seed=i if kind == "mixed" and i % 3 else None,
            max_tokens=4,
            store=False,
        )
        for i in range(count)
    ]
    found = run(engine, asked)
    assert 0 < accepted(found)[0] < accepted(found)[1]
    target = tiny_llama(1, vocab=vocab, **model)
    distribution = law_of_tokens(target, prompt, 3, temperature, top_p)
    drawn = Counter(tuple(tokens_of(own)[:3]) for own in found.values())
    assert chi_square(drawn, distribution) > 1e-3


def test_heads_are_swapped_between_rounds_and_misfits_refused() -> None:
    _, state = overfitted(True)
    engine = medusa_engine(k=K)
    engine.add(request("r", PROMPTS[3], max_tokens=60, ignore_eos=True))
    outputs = [o for _ in range(5) for o in engine.step()]
    engine.updates.put(SwapWeights("a", 4, state))
    engine.updates.put(SwapWeights("a", 5, {"residual": state["residual"]}))
    rest = run(engine)["r"]
    assert tokens_of(outputs + rest) == answers()[3]
    assert engine.drafts() == {"b": 0, "a": 4}
    lengths = [len(o.chunk.token_ids) for o in rest]
    assert sum(length == K + 1 for length in lengths) >= 0.8 * len(lengths)


@pytest.mark.parametrize("own_output", [True, False])
def test_heads_are_saved_and_loaded(tmp_path: Path, own_output: bool) -> None:
    config, state = overfitted(own_output)
    save_heads(tmp_path / "heads", config, state)
    found_config, found = load_heads(tmp_path / "heads")
    assert found_config == config
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not list((tmp_path / "heads").glob("*.bin"))
    facts = json.loads((tmp_path / "heads" / "config.json").read_text())
    facts["num_heads"] += 1
    (tmp_path / "heads" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="heads have tensors"):
        load_heads(tmp_path / "heads")
    with pytest.raises(ValueError, match="no Medusa heads"):
        load_heads(save_tiny(tmp_path / "model", 1, tokenizer=False))


def test_served_heads_equal_trained_ones() -> None:
    for own_output in (True, False):
        config, state = overfitted(own_output)
        weight = tiny_llama(1).lm_head.weight
        trained = MedusaHeads(config, weight)
        trained.load_state_dict(state)
        kv = KVCache([(1, 2)], 1, 16, weight.dtype, "cpu", hidden_size=32)
        stack = HeadStack("a", config, state, weight.detach(), kv)
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = trained(hidden)
        for steps in (1, 2, 3):
            torch.testing.assert_close(
                stack.logits(hidden, steps), expected[:steps], rtol=1e-4, atol=1e-4
            )


def test_an_engine_is_built_with_heads_beside_drafts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", 1)
    save_tiny(tmp_path / "draft", 2, layers=1)
    save_heads(tmp_path / "heads", *overfitted(True))
    settings = TargetSettings(
        str(tmp_path / "target"),
        {"b": str(tmp_path / "draft")},
        dtype="float32",
        num_threads=1,
        max_num_seqs=2,
        num_speculative_tokens=3,
    )
    beside = partial(stacks_of, {"a": tmp_path / "heads"})
    engine, _, _ = build_engine(settings, beside=beside)
    assert set(engine.drafts()) == {"a", "b", "b@0"}
    found = run(engine, [request("r", PROMPTS[3], max_tokens=40, ignore_eos=True)])
    assert tokens_of(found["r"]) == answers()[3][:40]
    assert accepted(found)[0] > 20
    # Alone, with the controller that knows what a head costs.
    free = dataclasses.replace(settings, drafts={}, num_speculative_tokens=None)
    engine, _, _ = build_engine(free, beside=beside)
    found = run(engine, [request("r", PROMPTS[3], max_tokens=40, ignore_eos=True)])
    assert tokens_of(found["r"]) == answers()[3][:40]
    pool = dataclasses.replace(settings, placement="pool")
    with pytest.raises(ValueError, match="must be colocated"):
        build_engine(pool, beside=beside)
    same = dataclasses.replace(settings, drafts={"a": settings.drafts["b"]})
    with pytest.raises(ValueError, match="two drafts have the name a"):
        build_engine(same, beside=beside)
    other = HeadsConfig(1, 16, 300)
    save_heads(tmp_path / "other", other, random_state(other, 1))
    with pytest.raises(ValueError, match="made for 300 tokens and hidden states of 16"):
        build_engine(settings, beside=partial(stacks_of, {"a": tmp_path / "other"}))


@torch.inference_mode()
def test_hidden_states_are_what_the_head_reads_fused_and_by_module() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]], device=DEVICE)
    positions = torch.arange(3, device=DEVICE).expand(2, -1)
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval()
    for model in (tiny_llama(1), gpt2):
        whole = model.to(DEVICE)(tokens, output_hidden_states=True).hidden_states[-1]
        runner = ModelRunner([served(model)], 2, 64, keep_hidden=True)
        for row in range(2):
            assert runner.kv.allocate(row, 8)
        check_hidden(ModelRunner([model], 2, 64, keep_hidden=True))
        for row in range(2):
            runner.prefill(row, tokens[row].tolist(), 0)
        found = runner.kv.read_hidden([0, 1], positions)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
        shifted = runner.kv.read_hidden([1], positions[:1] - 1)
        assert not shifted[0, 0].any()
        assert torch.equal(shifted[0, 1:], found[1, :2])
    assert isinstance(runner.decoder, ModuleDecoder)


def test_a_lesson_pairs_every_state_with_the_tokens_behind_the_next() -> None:
    target = tiny_llama(1)
    prompt, output = [5, 6, 7, 8], [9, 10, 11]
    dataset = make_dataset(target, [(prompt, output), ([3], [4, 5])], 2)
    with torch.no_grad():
        whole = target(torch.tensor([prompt + output]), output_hidden_states=True)
    none = -100
    assert dataset.labels.tolist() == [[5, none], [9, 10], [10, 11], [11, none]]
    torch.testing.assert_close(dataset.hidden[1:], whole.hidden_states[-1][0, 2:5])
    with pytest.raises(ValueError, match="long enough"):
        make_dataset(target, [([3], [4])], 2)


def test_the_loss_is_the_papers_weighted_sum() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, 2], [3, -100], [0, 4]])
    logs = torch.log_softmax(logits, -1)
    first = -(logs[0, 0, 1] + logs[0, 1, 3] + logs[0, 2, 0]) / 3
    second = -(logs[1, 0, 2] + logs[1, 2, 4]) / 2
    expected = 0.8 * first + 0.64 * second
    torch.testing.assert_close(medusa_loss(logits, labels, 0.8), expected)
    alone = -0.8 * logs[0, 1, 3]  # the second head has nothing to learn here
    torch.testing.assert_close(medusa_loss(logits[:, 1:2], labels[1:2], 0.8), alone)


def test_heads_start_as_the_target_head() -> None:
    weight = tiny_llama(1).lm_head.weight.detach()
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for own_output in (True, False):
        heads = MedusaHeads(HeadsConfig(2, 32, 300, own_output), weight)
        with torch.no_grad():
            torch.testing.assert_close(heads(hidden), (hidden @ weight.T).expand(2, -1, -1))
