"""Constrained answers are "mask, then sample", whatever is drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from distributions import chi_square
from engines import TOKENIZER, make_engine, request, run, tokens_of, twin_engine
from grammars import compiler_of, json_grammar
from llguidance import LLMatcher
from tiny_models import tiny_llama

from paceline.actors.engine.grammar import GrammarState, allowed_tokens

EOS = 2
WORDS = LLMatcher.grammar_from_regex("(e|o|en|on){1,3}")
CODE = LLMatcher.grammar_from_regex("(e[a-c]|o)7(e|o|Q){1,2}")  # forces its second or third token
PERSON = json_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["Ann", "Zoë"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def masked_law(
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    grammar: str,
    temperature: float,
    top_p: float = 1.0,
) -> dict[int, float]:
    """The law of the next token by definition: mask the target's logits, then sample."""
    state = GrammarState(compiler_of(TOKENIZER), grammar)
    for token in answer:
        state.append(token)
    allowed = allowed_tokens(state.mask(()))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double()
    probs = torch.softmax(logits[allowed] / temperature, -1)
    ordered, order = probs.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    ordered /= ordered.sum()
    return {allowed[i]: float(p) for i, p in zip(order, ordered, strict=True) if p > 0}


def law_of_answers(
    model: Any, prompt: Sequence[int], grammar: str, most: int, *sampling: float
) -> dict[tuple[int, ...], float]:
    """The law of whole answers, or of their first tokens."""
    law: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        before, mass = open_.popitem()
        for token, p in masked_law(model, prompt, before, grammar, *sampling).items():
            longer = (*before, token)
            done = token == EOS or len(longer) == most
            target = law if done else open_
            target[longer] = target.get(longer, 0.0) + mass * p
    return law


@pytest.mark.parametrize(
    ("kind", "grammar", "top_p", "support"),
    [
        pytest.param("unseeded", WORDS, 1.0, 4, marks=pytest.mark.full),
        pytest.param("seeded", WORDS, 1.0, 4, marks=pytest.mark.full),
        pytest.param("mixed", WORDS, 1.0, 4, marks=pytest.mark.full),
        pytest.param("unseeded", CODE, 1.0, 4, marks=pytest.mark.full),
        pytest.param("unseeded", WORDS, 0.8, 4, marks=pytest.mark.full),
        pytest.param("mixed", CODE, 0.9, 4, marks=pytest.mark.full),
        ("mixed", WORDS, 0.9, 1),
    ],
)
def test_constrained_answers_follow_the_masked_law(
    kind: str, grammar: str, top_p: float, support: int
) -> None:
    """Chi-square over 3,000 answers beside greedy and unconstrained neighbours."""
    count, prompt, temperature = 3000, [3, 70], 1.5
    engine = make_engine(max_num_seqs=128, seed=5, support=support, initializer_range=0.2)
    common: dict[str, Any] = {"max_tokens": 4, "store": False, "temperature": temperature}
    requests = [
        request(
            f"r{i}",
            prompt,
            grammar=grammar,
            top_p=top_p,
            draft=("a", "b", "off", "a")[i % 4],
            num_speculative_tokens=(3, 4, None, 2)[i % 4],
            seed=i if kind == "seeded" or (kind == "mixed" and i % 3 == 0) else None,
            **common,
        )
        for i in range(count)
    ]
    requests[::40] = [request(f"free{i}", prompt, **common) for i in range(count // 40)]
    found = run(engine, requests)
    answers = {name: tuple(tokens_of(o)) for name, o in found.items()}
    model = tiny_llama(1, initializer_range=0.2)
    law = law_of_answers(model, prompt, grammar, 4, temperature, top_p)
    assert sum(law.values()) == pytest.approx(1.0)
    drawn = Counter(tokens for name, tokens in answers.items() if name.startswith("r"))
    assert drawn.total() == count - count // 40
    assert chi_square(drawn, law) > 1e-3
    texts = {TOKENIZER.decode(a) for name, a in answers.items() if name.startswith("free")}
    assert len(texts) > 40


@pytest.mark.parametrize("grammar", [WORDS, PERSON], ids=["words", "person"])
@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
def test_speculation_changes_no_constrained_answer(grammar: str, seed: int | None) -> None:
    fields: dict[str, Any] = {"grammar": grammar, "seed": seed, "max_tokens": 40}
    fields["temperature"] = 0.0 if seed is None else 1.3
    model, answers = tiny_llama(1), {}
    for name, engine in {"random": make_engine(), "twin": twin_engine()}.items():
        plain = [request(f"plain{i}", [5, i + 9], draft="off", **fields) for i in range(4)]
        drafted = [request(f"draft{i}", [5, i + 9], **fields) for i in range(4)]
        found = run(engine, [*plain, *drafted])
        answers[name] = [tokens_of(found[f"draft{i}"]) for i in range(4)]
        assert answers[name] == [tokens_of(found[f"plain{i}"]) for i in range(4)]
        assert all(o[-1].chunk.finish_reason == "stop" for o in found.values())
    assert answers["random"] == answers["twin"]
    if seed is None:
        for i, answer in enumerate(answers["twin"]):
            for at, token in enumerate(answer):
                law = masked_law(model, [5, i + 9], answer[:at], grammar, 1.0)
                assert token == max(law, key=law.__getitem__)
