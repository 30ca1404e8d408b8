"""All logits processors within draft blocks: the distribution is that of decoding one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.actors.engine.logits_processors import (
    DraftLogitsProcessors,
    count_tokens,
    process_logits,
)
from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import make_sampling_batch, processed_probs
from paceline.actors.speculation.draft_sampling import draft_support
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    acceptance_probability,
    rejection_sample,
    residual,
)

VOCAB, DRAFTED = 3, 2
CPU = torch.device("cpu")
PATHS = list(itertools.product(range(VOCAB), repeat=DRAFTED))
PREFIXES = [p for n in range(DRAFTED + 1) for p in itertools.product(range(VOCAB), repeat=n)]

Table = dict[tuple[int, ...], list[float]]
logits_tables = st.fixed_dictionaries(
    {prefix: st.lists(st.floats(-4, 4), min_size=VOCAB, max_size=VOCAB) for prefix in PREFIXES}
)
histories = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
)


@st.composite
def sampling(draw: st.DrawFn, *, greedy: bool = False) -> SamplingParams:
    """Every processor at once, each sometimes off."""
    bias = draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=VOCAB))
    return SamplingParams(
        max_tokens=9,
        temperature=0.0 if greedy else draw(st.floats(0.3, 2.0)),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.6])),
        top_k=draw(st.sampled_from([0, 1, 2])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -2.0, 0.7, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -1.0, 0.5, 2.0])),
        logit_bias=tuple(bias.items()),
        min_tokens=draw(st.integers(0, 6)),
        all_stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))),
    )


def by_definition(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """The distribution of the next token, one token at a time, as the fields are documented."""
    scores = [value + dict(params.logit_bias).get(v, 0.0) for v, value in enumerate(logits)]
    for v in range(VOCAB):
        if v in prompt or v in output:
            penalty = params.repetition_penalty
            scores[v] = scores[v] / penalty if scores[v] > 0 else scores[v] * penalty
        scores[v] -= params.frequency_penalty * output.count(v)
        scores[v] -= params.presence_penalty * (v in output)
        if len(output) < params.min_tokens and v in params.all_stop_token_ids:
            scores[v] = -math.inf
    if params.greedy:
        return [float(v == max(range(VOCAB), key=scores.__getitem__)) for v in range(VOCAB)]
    best = max(scores)
    distribution = [math.exp((value - best) / params.temperature) for value in scores]
    order = sorted(range(VOCAB), key=distribution.__getitem__, reverse=True)
    kept = order[: params.top_k or VOCAB]
    total, before = sum(distribution[v] for v in kept), 0.0
    chosen = []
    for v in kept:
        within_p = params.top_p == 1.0 or before < params.top_p * total or v == kept[0]
        if within_p and distribution[v] >= params.min_p * distribution[kept[0]]:
            chosen.append(v)
        before += distribution[v]
    mass = sum(distribution[v] for v in chosen)
    return [distribution[v] / mass if v in chosen else 0.0 for v in range(VOCAB)]


def block_distributions(
    table: Table, params: SamplingParams, prompt: list[int], output: list[int]
) -> dict[tuple[int, ...], Tensor]:
    """p of every position along every draft path, ``[k + 1, V]``, as the engine computes it.

    All paths are rows of one batch, with a row without processors among them.
    """
    plain = SamplingParams(max_tokens=9)
    batch = make_sampling_batch([plain, *[params] * len(PATHS)], CPU)
    paths = [PATHS[0], *PATHS]
    logits = torch.tensor([[table[path[:i]] for i in range(DRAFTED + 1)] for path in paths])
    tokens = [*prompt, *output]
    counts = count_tokens(batch.logits_processors, [(tokens, len(output))] * len(paths), VOCAB, CPU)
    positions = torch.full((len(paths),), len(output))
    before = logits.clone()
    processed = process_logits(
        logits, batch.logits_processors, positions, counts, torch.tensor(paths)
    )
    assert torch.equal(logits, before), "the raw logits go to replay"
    assert torch.equal(processed[0], logits[0]), "a row without processors keeps its bits"
    if params.greedy:
        probs = torch.nn.functional.one_hot(processed.argmax(-1), VOCAB).double()
    else:
        probs = processed_probs(processed, batch).dense(VOCAB).double()
    return dict(zip(PATHS, probs[1:], strict=True))


def draft_distributions(
    table: Table, params: SamplingParams, prompt: list[int], output: list[int], support: int
) -> dict[tuple[int, ...], Tensor]:
    """q along every draft path, ``[k, V]``, as an expert computes it step by step."""
    batch = make_sampling_batch([params] * len(PATHS), CPU)
    tokens = [*prompt, *output]
    positions = torch.full((len(PATHS),), len(output))
    processors = DraftLogitsProcessors(
        batch.logits_processors, [(tokens, len(output))] * len(PATHS), positions, {}
    )
    distributions = []
    for step in range(DRAFTED):
        logits = torch.tensor([table[path[:step]] for path in PATHS])
        ids, probs, _ = draft_support(processors.apply(logits), batch, support)
        if params.greedy:
            ids, probs = ids[:, :1], torch.ones(len(PATHS), 1)
        distributions.append(torch.zeros(len(PATHS), VOCAB).scatter_(1, ids, probs).double())
        processors.append(torch.tensor([path[step] for path in PATHS]))
    return dict(zip(PATHS, torch.stack(distributions, 1), strict=True))


def emitted(
    p: dict[tuple[int, ...], Tensor], q: dict[tuple[int, ...], Tensor]
) -> dict[tuple[int, ...], float]:
    """Law of the tokens that one round emits: all drafts, acceptances and rejections summed up."""
    distribution: dict[tuple[int, ...], float] = {}

    def add(tokens: tuple[int, ...], mass: float) -> None:
        distribution[tokens] = distribution.get(tokens, 0.0) + mass

    def walk(prefix: tuple[int, ...], mass: float) -> None:
        path = next(path for path in PATHS if path[: len(prefix)] == prefix)
        here = p[path][len(prefix)]
        if len(prefix) == DRAFTED:
            for v in range(VOCAB):
                add((*prefix, v), mass * float(here[v]))
            return
        drafted = q[path][len(prefix)]
        accept = drafted * acceptance_probability(here, drafted)
        rest = residual(here[None], torch.arange(VOCAB)[None], drafted[None])[0]
        rest = (1.0 - accept.sum()) * rest / rest.sum()
        for v in range(VOCAB):
            add((*prefix, v), mass * float(rest[v]))
            if accept[v] > 0:
                walk((*prefix, v), mass * float(accept[v]))

    walk((), 1.0)
    return distribution


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_block_with_all_processors_has_the_distribution_of_single_tokens(
    greedy: bool, data: st.DataObject
) -> None:
    """k = 2, V = 3: every outcome of a round, and on by p itself, is as likely as by definition."""
    params = data.draw(sampling(greedy=greedy))
    prompt, output = data.draw(histories)
    table, other = data.draw(logits_tables), data.draw(logits_tables)
    p = block_distributions(table, params, prompt, output)
    q = draft_distributions(other, params, prompt, output, data.draw(st.integers(1, VOCAB)))

    for path in PATHS:
        for step in range(DRAFTED + 1):
            before = [*output, *path[:step]]
            _assert_distribution(p[path][step].tolist(), table[path[:step]], params, prompt, before)
    round_distribution = emitted(p, q)
    assert sum(round_distribution.values()) == pytest.approx(1.0, abs=1e-5)
    for target in itertools.product(range(VOCAB), repeat=DRAFTED + 1):
        total, exact = 0.0, 1.0
        for n in range(DRAFTED + 1):
            exact *= float(p[_path(target)][n][target[n]])
        for tokens, mass in round_distribution.items():
            if target[: len(tokens)] == tokens:
                for n in range(len(tokens), DRAFTED + 1):
                    mass *= float(p[_path(target)][n][target[n]])
                total += mass
        assert total == pytest.approx(exact, abs=1e-5)


def _path(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens[:DRAFTED]


def _assert_distribution(
    found: list[float],
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
) -> None:
    """The distribution is the definition's, or that of slightly other logits if a filter cuts."""
    hair = 1e-5
    for shift in sorted(itertools.product((0.0, -hair, hair), repeat=VOCAB), key=any):
        shifted = [value + move for value, move in zip(logits, shift, strict=True)]
        expected = by_definition(shifted, params, prompt, output)
        if found == pytest.approx(expected, abs=1e-4):
            return
    assert found == by_definition(logits, params, prompt, output)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rejection_sampling_uses_the_processed_distribution(data: st.DataObject) -> None:
    """Greedy rows of every path: what is accepted and added is the one-by-one continuation."""
    params = data.draw(sampling(greedy=True))
    prompt, output = data.draw(histories)
    table = data.draw(logits_tables)
    batch = make_sampling_batch([params] * len(PATHS), CPU)
    logits = torch.tensor([[table[path[:i]] for i in range(DRAFTED + 1)] for path in PATHS])
    tokens = torch.tensor(PATHS)
    ones = torch.ones(len(PATHS), DRAFTED)
    full = torch.full((len(PATHS),), DRAFTED)
    proposal = Proposal(tokens, full, ones, tokens[..., None], ones[..., None])
    positions = torch.full((len(PATHS),), len(output))
    histories_ = [([*prompt, *output], len(output))] * len(PATHS)
    counts = count_tokens(batch.logits_processors, histories_, VOCAB, CPU)
    sampled = rejection_sample(logits, proposal, batch, positions, torch.Generator(), counts)
    p = block_distributions(table, params, prompt, output)
    for row, path in enumerate(PATHS):
        own = [int(position.argmax()) for position in p[path]]
        accepted = next((i for i in range(DRAFTED) if own[i] != path[i]), DRAFTED)
        assert int(sampled.num_accepted[row]) == accepted
        assert int(sampled.final_tokens[row]) == own[accepted]


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"presence_penalty": 1.0}, [2.0, 1.0, 0.5], [1.0, 1.0, 0.5]),
        ({"frequency_penalty": 0.5}, [2.0, 1.0, 0.5], [1.5, 1.0, 0.5]),
        ({"repetition_penalty": 2.0}, [2.0, 0.5, 0.5], [1.0, 0.5, 0.5]),
        ({"logit_bias": ((2, -100.0),)}, [2.0, 1.0, -99.5], [2.0, 1.0, -99.5]),
        (
            {"min_tokens": 1, "all_stop_token_ids": (0,)},
            [-math.inf, 1.0, 0.5],
            [2.0, 1.0, 0.5],
        ),
    ],
    ids=["presence", "frequency", "repetition", "bias", "min_tokens"],
)
def test_one_processor_by_hand(
    fields: dict[str, Any], first: list[float], second: list[float]
) -> None:
    """The prompt is token 1, the draft token 0: it counts at the position after it."""
    batch = make_sampling_batch([SamplingParams(max_tokens=9, **fields)], CPU)
    counts = count_tokens(batch.logits_processors, [([1], 0)], VOCAB, CPU)
    logits = torch.tensor([[[2.0, 1.0, 0.5]] * 2])
    draft, start = torch.tensor([[0]]), torch.tensor([0])
    assert process_logits(logits, batch.logits_processors, start, counts, draft).tolist() == [
        [first, second]
    ]
