"""The engine samples from the target's distribution, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from distributions import chi_square, law_of_tokens
from engines import make_engine, request, run, tokens_of
from tiny_models import tiny_llama


@pytest.mark.parametrize(
    ("kind", "top_p"),
    [
        ("unseeded", 1.0),
        ("mixed", 0.8),
        *(
            pytest.param(kind, top_p, marks=pytest.mark.full)
            for kind, top_p in (("unseeded", 0.8), ("mixed", 1.0), ("seeded", 1.0), ("seeded", 0.8))
        ),
    ],
)
def test_the_engine_samples_from_the_target_distribution(kind: str, top_p: float) -> None:
    """Chi-square over 4,000 answers of four tokens, drafted three at a time from a cut support.

    The joint distribution of the first three is the target's; greedy neighbours stay greedy.
    """
    vocab, count, prompt, temperature = 7, 4000, [3], 1.2
    engine = make_engine(
        vocab=vocab, max_num_seqs=256, eos=-1, seed=5, support=3, initializer_range=0.5
    )
    common: dict[str, Any] = {"max_tokens": 4, "store": False}
    requests = [
        request(
            f"r{i}",
            prompt,
            temperature=temperature,
            top_p=top_p,
            draft=("a", "b", "off", "a")[i % 4],
            num_speculative_tokens=(3, 3, None, 2)[i % 4],
            seed=i if kind == "seeded" or (kind == "mixed" and i % 3 == 0) else None,
            **common,
        )
        for i in range(count)
    ]
    greedy = [request(f"g{i}", prompt, **common) for i in range(count // 50)]
    requests[::50] = greedy
    answers = {name: tuple(tokens_of(o)) for name, o in run(engine, requests).items()}
    model = tiny_llama(1, vocab=vocab, initializer_range=0.5)
    distribution = law_of_tokens(model, prompt, 3, temperature, top_p)
    drawn = Counter(tokens[:3] for name, tokens in answers.items() if name.startswith("r"))
    assert drawn.total() == count - len(greedy)
    assert chi_square(drawn, distribution) > 1e-3
    assert len({tokens for name, tokens in answers.items() if name.startswith("g")}) == 1
