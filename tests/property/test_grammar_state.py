"""A grammar's mask depends on the tokens before it alone, whatever was looked up in between."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from fixture_models import TARGET
from grammars import GRAMMARS, compiler_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from transformers import AutoTokenizer

from paceline.actors.engine.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarState,
    Mask,
    allowed_tokens,
    allows,
    only_token,
)

COMPILERS = {
    "tiny": compiler_of(tiny_tokenizer()),
    "small": compiler_of(AutoTokenizer.from_pretrained(TARGET)),
}
EOS = 2


def fresh_mask(compiler: GrammarCompiler, grammar: str, tokens: list[int]) -> Mask:
    """By a matcher that has seen nothing else, and was asked for no mask before."""
    compiler.forget(grammar, compiler.compile(grammar))
    matcher = compiler.compile(grammar).deep_copy()
    assert matcher.consume_tokens(tokens), matcher.get_error()
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    assert not matcher.is_error(), matcher.get_error()
    return mask


def walk(state: GrammarState, path: list[int], steps: int, random: Random) -> list[int]:
    """A path of allowed tokens, without the end."""
    path = list(path)
    for _ in range(steps):
        choices = [t for t in allowed_tokens(state.mask(path)) if t != EOS]
        if not choices:
            break
        path.append(random.choice(choices))
    return path


@pytest.mark.parametrize("name", COMPILERS)
@given(grammar=GRAMMARS, random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_masks_depend_on_the_tokens_alone(name: str, grammar: str, random: Random) -> None:
    compiler = COMPILERS[name]
    try:
        state = GrammarState(compiler, grammar)
    except GrammarError:
        return  # not every schema has a grammar
    answer: list[int] = []
    for _ in range(12):
        paths = [walk(state, [], random.randrange(6), random) for _ in range(random.randrange(3))]
        for path in paths:
            tail = state.forced(path, random.randrange(5))
            cut = random.randrange(len(path) + 1)
            other = walk(state, path[:cut], 2, random)
            for asked in (path, other, [*path, *[t for t in tail if t != EOS]]):
                expected = fresh_mask(compiler, grammar, [*answer, *asked])
                assert np.array_equal(state.mask(asked), expected)
            forbidden = set(range(300)) - set(allowed_tokens(state.mask(path)))
            wrong = random.choice(sorted(forbidden))
            with pytest.raises(GrammarError, match="not in the grammar"):
                state.mask([*path, wrong])
        following = paths[-1][0] if paths and paths[-1] and random.random() < 0.7 else None
        token = following or random.choice(allowed_tokens(state.mask(())))
        state.append(token)
        if token == EOS:
            return
        answer.append(token)
        assert np.array_equal(state.mask(()), fresh_mask(compiler, grammar, answer))


@given(st.sets(st.integers(0, 299), max_size=3))
def test_only_token(tokens: set[int]) -> None:
    bits = np.zeros(320, dtype=np.uint8)
    bits[list(tokens)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    assert only_token(mask) == (tokens.copy().pop() if len(tokens) == 1 else None)
    assert [t for t in range(400) if allows(mask, t)] == sorted(tokens)
