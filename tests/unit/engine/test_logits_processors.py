"""Penalties, bias, min_p, min_tokens, stop tokens and log-probabilities through the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from distributions import chi_square
from engines import MAX_LEN, TOKENIZER, make_engine, request, run, served, tokens_of, use_proposer
from tiny_models import tiny_llama

from paceline.actors.engine.engine import StepOutput
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import TokenLogprob
from paceline.actors.speculation.colocated import ColocatedProposer
from paceline.actors.speculation.experts import ExpertStack

PROMPTS = [
    TOKENIZER.encode(text, add_special_tokens=False)
    for text in ("SELECT name", "Ann has 12 apples. She buys 30 more.", "List all", "x y z")
]
ALL = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "min_p": 0.02,
    "min_tokens": 6,
    "logit_bias": ((40, 3.0), (41, -100.0), (50, 2.0)),
}


def with_rules(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """The rules of ALL on the logits ``[V]`` of one position, in plain words."""
    for token, value in ALL["logit_bias"]:  # type: ignore[attr-defined]
        logits[token] += value
    for token in {*prompt, *output}:
        logits[token] *= 1.2 if logits[token] < 0 else 1 / 1.2
    for token, count in Counter(output).items():
        logits[token] -= 0.4 * count + 0.3
    if len(output) < 6:
        logits[2] = -torch.inf
    return logits


@torch.inference_mode()
def one_by_one(prompt: Sequence[int], count: int) -> list[int]:
    model, output = tiny_llama(1), []
    while len(output) < count and output[-1:] != [2]:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        output.append(int(with_rules(logits, prompt, output).argmax()))
    return output


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_greedy_with_all_rules_equals_one_by_one(k: int) -> None:
    """A batch in which every other row has no rules, with good drafts and bad ones."""
    for draft_seed in (1, 2):
        plain = run(make_engine(k=k, draft_seed=draft_seed), _crowd({}))
        ruled = run(make_engine(k=k, draft_seed=draft_seed), _crowd(ALL))
        for i, prompt in enumerate(PROMPTS):
            found = tokens_of(ruled[f"r{i}"])
            expected = one_by_one(prompt, 40) if i % 2 else tokens_of(plain[f"r{i}"])
            assert found == expected, f"r{i}"


def _crowd(rules: dict[str, Any]) -> list[Any]:
    return [
        request(f"r{i}", prompt, max_tokens=40, draft="ab"[i % 2], **(rules if i % 2 else {}))
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.full), 4])
@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"min_tokens": 9}, {"min_new_tokens": 9}),
        (
            {"repetition_penalty": 0.8, "min_tokens": 30},
            {"repetition_penalty": 0.8, "min_new_tokens": 30},
        ),
    ],
    ids=["repetition", "min_tokens", "both"],
)
def test_greedy_equals_generate_with_its_own_processors(
    k: int, own: dict[str, Any], theirs: dict[str, Any]
) -> None:
    for prompt in PROMPTS:
        model = tiny_llama(1)
        # An end that comes early without the ban, so that min_tokens has something to do.
        eos = tokens_of(run(make_engine(eos=-1), [request("r", prompt)])["r"])[3]
        model.generation_config.eos_token_id = eos
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0, **theirs
        )
        outputs = run(make_engine(k=k, eos=eos), [request("r", prompt, max_tokens=40, **own)])
        assert tokens_of(outputs["r"]) == ids[0, len(prompt) :].tolist()


def test_a_seed_and_a_choice_fix_the_text_whatever_speculation_does() -> None:
    texts: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for draft, k in [("off", 0), ("a", 4), ("b", 2), ("a", 7)]:
        requests = [
            request(
                f"r{choice}",
                PROMPTS[1],
                temperature=0.9,
                top_p=0.95,
                seed=11,
                choice=choice,
                draft=draft,
                num_speculative_tokens=k,
                max_tokens=40,
                **ALL,
            )
            for choice in (0, 1)
        ]
        outputs = run(make_engine(), requests)
        for choice in (0, 1):
            texts[choice].add(tuple(tokens_of(outputs[f"r{choice}"])))
    assert len(texts[0]) == len(texts[1]) == 1
    assert texts[0] != texts[1]


def test_the_first_choice_is_the_only_one_s_text() -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    alone = run(make_engine(), [request("r", PROMPTS[0], **fields)])["r"]
    both = [request(f"r{i}", PROMPTS[0], choice=i, **fields) for i in range(2)]
    assert tokens_of(run(make_engine(), both)["r0"]) == tokens_of(alone)


@pytest.mark.parametrize("seeded", [False, pytest.param(True, marks=pytest.mark.full)])
def test_samples_with_penalties_follow_the_distribution(seeded: bool) -> None:
    """Chi-square over 2,000 answers of four tokens, drafted three at a time from a cut support."""
    vocab, count, prompt = 7, 2000, [3, 4]
    rules: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.8,
        "presence_penalty": -0.5,
        "min_p": 0.05,
        "min_tokens": 2,
        "stop_token_ids": (6,),
        "logit_bias": ((2, 1.0),),
    }
    engine = make_engine(
        vocab=vocab, max_num_seqs=256, eos=-1, seed=5, support=3, initializer_range=0.5
    )
    requests = [
        request(
            f"r{i}",
            prompt,
            temperature=1.2,
            max_tokens=4,
            store=False,
            draft="ab"[i % 2],
            num_speculative_tokens=(3, 2, 0, 3)[i % 4],
            seed=i if seeded else None,
            **rules,
        )
        for i in range(count)
    ]
    answers = [tuple(tokens_of(outputs)) for outputs in run(engine, requests).values()]
    model = tiny_llama(1, vocab=vocab, initializer_range=0.5)
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for before, mass in distribution.items():
            if before[-1:] == (6,):  # it has ended
                longer[before] = mass
                continue
            for token, p in _distribution(model, prompt, before).items():
                longer[(*before, token)] = mass * p
        distribution = longer
    assert chi_square(Counter(answer[:3] for answer in answers), distribution) > 1e-3


@torch.inference_mode()
def _distribution(model: Any, prompt: list[int], output: tuple[int, ...]) -> dict[int, float]:
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].double()
    logits[2] += 1.0
    for token in {*prompt, *output}:
        logits[token] *= 1.5 if logits[token] < 0 else 1 / 1.5
    for token, times in Counter(output).items():
        logits[token] -= 0.8 * times - 0.5
    if len(output) < 2:
        logits[6] = -torch.inf
    probs = torch.softmax(logits / 1.2, -1)
    probs[probs < 0.05 * probs.max()] = 0.0
    return {i: float(p) for i, p in enumerate(probs / probs.sum()) if p > 0}


@pytest.mark.parametrize("k", [0, 5])
def test_a_stop_token_ends_the_answer_and_its_text_is_not_shown(k: int) -> None:
    whole = tokens_of(run(make_engine(eos=-1), [request("r", PROMPTS[1], max_tokens=30)])["r"])
    stop = whole[9]
    end = whole.index(stop)
    outputs = run(
        make_engine(eos=-1, k=k),
        [request("r", PROMPTS[1], max_tokens=30, stop_token_ids=(stop, 299), ignore_eos=True)],
    )["r"]
    assert tokens_of(outputs) == whole[: end + 1]
    assert outputs[-1].chunk.finish_reason == "stop"
    assert text_of(outputs) == TOKENIZER.decode(whole[:end], skip_special_tokens=True)


def text_of(outputs: list[StepOutput]) -> str:
    return "".join(output.chunk.text for output in outputs)


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_string_cuts_tokens_and_logprobs_with_the_text(k: int) -> None:
    ask: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    free = run(make_engine(k=k), [request("r", PROMPTS[0], **ask)])["r"]
    text, tokens = text_of(free), tokens_of(free)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = text.index(stop)
    outputs = run(make_engine(k=k), [request("r", PROMPTS[0], stop=(stop,), **ask)])["r"]
    kept = sum(item.text_offset < cut for item in logprobs_of(free))
    assert text_of(outputs) == text[:cut]
    assert tokens_of(outputs) == tokens[:kept]
    assert len(logprobs_of(outputs)) == kept
    assert outputs[-1].chunk.num_cut_tokens > 0
    shown = 0
    for output in outputs:  # no token comes before its text
        offsets = [item.text_offset for item in output.chunk.logprobs or ()]
        shown += len(output.chunk.text)
        assert all(offset < shown for offset in offsets)


def logprobs_of(outputs: list[StepOutput]) -> list[TokenLogprob]:
    return [item for output in outputs for item in output.chunk.logprobs or ()]


@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (4, 0.0), (4, 0.9)])
def test_logprobs_are_the_targets_own_before_rules_and_temperature(
    k: int, temperature: float
) -> None:
    ask = request("r", PROMPTS[1], temperature=temperature, max_tokens=20, logprobs=5, **ALL)
    other = request("s", PROMPTS[0], max_tokens=20)
    answers = run(make_engine(k=k), [other, ask])
    tokens, items = tokens_of(answers["r"]), logprobs_of(answers["r"])
    assert logprobs_of(answers["s"]) == []
    assert answers["s"][-1].chunk.logprobs is None
    with torch.inference_mode():
        whole = tiny_llama(1)(torch.tensor([[*PROMPTS[1], *tokens]])).logits[0]
    distributions = torch.log_softmax(whole[len(PROMPTS[1]) - 1 : -1], -1)
    assert len(items) == len(tokens)
    for item, token, distribution in zip(items, tokens, distributions, strict=True):
        assert item.logprob == pytest.approx(float(distribution[token]), abs=1e-4)
        values, ids = distribution.topk(5)
        assert [value for _, value in item.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [i for i, _ in item.top] == ids.tolist()
    text = text_of(answers["r"])
    offsets = [item.text_offset for item in items]
    assert offsets == sorted(offsets)
    for start, end, token in zip(offsets, [*offsets[1:], len(text)], tokens, strict=True):
        piece = TOKENIZER.decode([token])
        if "\ufffd" not in piece and token > 4:
            assert text[start:end].endswith(piece)


def test_no_stop_string_ends_the_answer_before_min_tokens() -> None:
    text = text_of(run(make_engine(eos=-1), [request("r", PROMPTS[0], max_tokens=30)])["r"])
    stop = text[3:5]
    outputs = run(
        make_engine(eos=-1),
        [request("r", PROMPTS[0], max_tokens=30, stop=(stop,), min_tokens=25)],
    )["r"]
    generated = len(tokens_of(outputs)) + outputs[-1].chunk.num_cut_tokens
    assert generated >= 25
    assert text.startswith(text_of(outputs))
    assert stop in text_of(outputs)


def test_records_hold_the_raw_and_the_processed_distribution() -> None:
    ask = request("r", PROMPTS[1], temperature=0.9, seed=3, max_tokens=20, **ALL)
    outputs = run(make_engine(), [ask])["r"]
    record = outputs[-1].record
    assert record is not None
    tokens = tokens_of(outputs)
    with torch.inference_mode():
        whole = tiny_llama(1)(torch.tensor([[*PROMPTS[1], *tokens]])).logits[0]
    distributions = torch.log_softmax(whole[len(PROMPTS[1]) - 1 : -1], -1)
    ids = torch.tensor(record.target_top_ids, dtype=torch.int64)
    found = torch.tensor(record.target_top_logprobs).float()
    torch.testing.assert_close(found, distributions.gather(-1, ids), atol=2e-2, rtol=1e-2)
    assert record.processed_top_probs is not None
    for i, row in enumerate(record.processed_top_probs):
        logits = with_rules(whole[len(PROMPTS[1]) - 1 + i].clone(), PROMPTS[1], tokens[:i])
        probs = torch.softmax(logits / 0.9, -1)
        probs[probs < 0.02 * probs.max()] = 0.0
        expected = (probs / probs.sum())[ids[i]]
        torch.testing.assert_close(torch.tensor(row).float(), expected, atol=2e-3, rtol=1e-2)


def test_a_twin_draft_with_the_same_processors_is_fully_accepted() -> None:
    """The draft applies the rules too: where it is the target itself, nothing is rejected."""
    engine = make_engine(k=4, draft_seed=1, max_num_seqs=1)
    stack = ExpertStack(ModelRunner([served(tiny_llama(1))], 4, MAX_LEN), ["a"], 4)
    use_proposer(engine, ColocatedProposer([stack], 300, torch.Generator()))
    for name, fields in [("g", {}), ("s", {"temperature": 0.8, "seed": 4})]:
        ask = request(name, PROMPTS[1], max_tokens=21, ignore_eos=True, **fields, **ALL)
        stats = run(engine, [ask])[name][-1].chunk.speculative
        assert stats is not None
        assert stats.num_draft_tokens == stats.num_accepted_draft_tokens > 0
