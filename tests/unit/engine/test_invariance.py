"""On CPUs with the kernels, a token's logits have the same bits in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import request, run, tokens_of
from fixture_models import DRAFT, TARGET
from torch import Tensor

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.model_runner import ModelRunner, PromptTokens
from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.engine.numerics import batch_invariant
from paceline.actors.engine.request import GenerationRequest
from paceline.actors.engine.sampling import TargetProbs, processed_probs
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation import rejection_sampler

CPU = torch.device("cpu")
LENGTH, ROWS, CAPACITY = 50, 8, 128

WAYS = [(folder, dtype) for folder in (TARGET, DRAFT) for dtype in (torch.bfloat16, torch.float32)]


def skip_where_it_cannot_be(dtype: torch.dtype) -> None:
    if kernels_for(CPU, dtype) is None:
        pytest.skip("no compiler made the kernels")


def made(folder: Path, dtype: torch.dtype) -> ModelRunner:
    skip_where_it_cannot_be(dtype)
    model = load_causal_lm(folder, dtype)
    runner = ModelRunner([model], ROWS, CAPACITY)
    for length in (20, 60, CAPACITY):  # so that the rows' blocks lie apart
        for row in (3, 1, 4, 0, 5, 2, 6, 7):
            assert runner.kv.allocate(row, length)
    return runner


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0].name}-{way[1]}")
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return made(*request.param)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def computed(runner: ModelRunner, tokens: Tensor, rows: list[int], steps: list[int]) -> Tensor:
    """Logits of ``[B, LENGTH]`` tokens, so many at a time."""
    parts, start = [], 0
    for count in steps:
        positions = torch.arange(start, start + count).expand(len(rows), -1)
        part = tokens[:, start : start + count]
        parts.append(runner.forward(rows, part, positions, start + count))
        start += count
    return torch.cat(parts, dim=1)


def test_one_by_one_is_many_at_a_time_is_a_crowd(runner: ModelRunner) -> None:
    assert isinstance(runner.decoder, FusedDecoder)
    tokens = torch.randint(5, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    alone = computed(runner, tokens[:1], [0], [1] * LENGTH)
    for steps in ([LENGTH], [5] * 10, [7, 2, 1, 9, 3, 8, 20], [33, 17]):
        assert torch.equal(computed(runner, tokens[:1], [3], steps), alone)
        assert torch.equal(computed(runner, tokens, list(range(ROWS)), steps)[:1], alone)
    scattered = computed(runner, tokens[[5, 0, 6]], [6, 1, 4], [10] * 5)
    assert torch.equal(scattered[1:2], alone)


def test_a_longer_neighbour_changes_nothing(runner: ModelRunner) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, 4000, (2, 6), generator=generator)
    long = torch.randint(5, 4000, (1, 100), generator=generator)
    runner.prefill(1, long[0].tolist(), 0)
    alone = runner.forward([0], tokens[:1], torch.arange(6)[None], 6)
    positions = torch.stack([torch.arange(6), torch.arange(100, 106)])
    assert torch.equal(runner.forward([0, 1], tokens, positions, 106)[:1], alone)


def test_verification_of_own_tokens_alone_has_the_bits_of_a_padded_one(runner: ModelRunner) -> None:
    assert runner.is_ragged
    drafted, start, span = torch.tensor([2, 0, 5, 1]), 20, 26
    rows, own = [3, 1, 4, 0], torch.arange(6) <= drafted[:, None]
    tokens = torch.randint(5, 4000, (4, 26), generator=torch.Generator().manual_seed(7))
    for row, ids in zip(rows, tokens.tolist(), strict=True):
        runner.prefill(row, ids[:start], 0)
    positions = torch.arange(start, span).expand(4, -1)
    ragged = runner.verify(rows, tokens[:, start:], positions, span, drafted)
    # The keys of the verified tokens are there for what follows.
    after = torch.full((1, 1), start + 6)
    found = runner.forward([4], tokens[:1, :1], after, span + 1)
    padded = runner.forward(rows, tokens[:, start:], positions, span)
    assert torch.equal(ragged[own], padded[own])
    assert not ragged[~own].any()
    assert torch.equal(found, runner.forward([4], tokens[:1, :1], after, span + 1))
    short = runner.verify(rows, tokens[:, start:], positions, span, torch.ones(4).long())
    assert torch.equal(short[:, :2], padded[:, :2])
    assert not short[:, 2:].any()


def test_prompts_in_the_forward_that_decodes_change_no_bit(runner: ModelRunner) -> None:
    """One row drafts, the prompt of one ends here, that of another goes on."""
    tokens = torch.randint(5, 4000, (3, 40), generator=torch.Generator().manual_seed(8)).tolist()
    drafted, span = torch.tensor([2, 0]), 31

    def ends(rows: list[int], *, together: bool) -> tuple[Tensor, Tensor]:
        runner.prefill(rows[0], tokens[0][:20], 0)
        parts = [
            PromptTokens(rows[1], tokens[1][:30], 0),
            PromptTokens(rows[2], tokens[2][:9], 0),
        ]
        if not together:
            for part in parts:
                runner.prefill_prompts([part])
        own = torch.tensor([tokens[0][20:23], [tokens[1][30], 0, 0]])
        at = torch.stack([torch.arange(20, 23), torch.arange(30, 33)])
        logits = runner.verify(rows[:2], own, at, span, drafted, parts if together else ())
        runner.prefill_prompts([PromptTokens(rows[2], tokens[2][9:20], 9)])
        after = torch.tensor([[7], [8], [9]]), torch.tensor([[23], [31], [20]])
        return logits, runner.forward(rows, *after, 32)

    apart, merged = ends([3, 1, 4], together=False), ends([0, 5, 2], together=True)
    assert all(torch.equal(one, other) for one, other in zip(apart, merged, strict=True))
    assert not merged[0][1, 1:].any()
    assert torch.equal(
        merged[1][1],
        computed(runner, torch.tensor([[*tokens[1][:31], 8]]), [6], [32])[0, -1:],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_do_not_depend_on_speculation_neighbours_prefixes_or_a_second_try(
    dtype: str,
) -> None:
    """Greedy text of the small models, whatever else is computed beside it."""
    numeric = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    skip_where_it_cannot_be(numeric)
    settings = TargetSettings(
        str(TARGET),
        {"general": str(DRAFT)},
        dtype=dtype,
        num_threads=1,
        max_num_seqs=6,
        numerics="invariant",
        # room for two of the six, so that some are put off and computed again
        kv_cache_mb=numeric.itemsize,
        max_model_len=96,
    )
    engine, tokenizer, facts = build_engine(settings)
    assert facts.numerics == "invariant"
    texts = [f"How many of the {n} users have ordered more than {n + 3} books?" for n in range(6)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]

    def answers(draft: str, k: int | None, *, together: bool) -> list[list[int]]:
        asked = [
            request(
                f"{draft}-{k}-{together}-{n}",
                prompt,
                draft=draft,
                max_tokens=32,
                num_speculative_tokens=k,
                ignore_eos=True,
            )
            for n, prompt in enumerate(prompts)
        ]
        groups = [asked] if together else [[one] for one in asked]
        found = [run(engine, group) for group in groups]
        return [
            tokens_of(outputs[one.request_id])
            for one in asked
            for outputs in found
            if one.request_id in outputs
        ]

    alone = answers("off", None, together=False)
    assert answers("off", None, together=True) == alone
    assert answers("general", 8, together=True) == alone
    assert answers("general", 3, together=False) == alone
    assert answers("general", None, together=True) == alone
    assert engine.preemptions > 0


def test_a_neighbour_that_widens_the_batchs_logits_changes_no_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A logit_bias makes the logits of all rows float32."""
    skip_where_it_cannot_be(torch.bfloat16)
    settings = TargetSettings(
        str(TARGET), {}, dtype="bfloat16", num_threads=1, num_speculative_tokens=0
    )
    seeded, biased = (
        request(
            name,
            [5, 17, 30, token],
            draft="off",
            temperature=0.8,
            top_p=0.9,
            seed=1,
            max_tokens=16,
            ignore_eos=True,
            logit_bias=bias,
        )
        for name, token, bias in (("seeded", 44, ()), ("biased", 45, ((3, 1.0),)))
    )
    rows: list[Tensor] = []

    def kept(logits: Tensor, *rest: Any) -> TargetProbs:
        found = processed_probs(logits, *rest)
        rows.append(found.dense(logits.shape[-1])[0])
        return found

    monkeypatch.setattr(rejection_sampler, "processed_probs", kept)

    def probs(*asked: GenerationRequest) -> Tensor:
        rows.clear()
        run(build_engine(settings)[0], asked)
        return torch.cat(rows)

    assert torch.equal(probs(seeded, biased), probs(seeded))


def test_a_forward_that_is_large_enough_for_another_algorithm_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of 8 rows with 9 tokens each has 72: bits that change there must be seen."""
    runner = made(TARGET, torch.float32)
    for row in range(ROWS):
        runner.kv.free(row)
    assert batch_invariant(runner)
    forward = runner.forward

    def switching(rows: Any, tokens: Tensor, *rest: Any) -> Tensor:
        logits: Tensor = forward(rows, tokens, *rest)
        return logits if tokens.numel() < 72 else torch.nextafter(logits, logits + 1.0)

    monkeypatch.setattr(runner, "forward", switching)
    assert not batch_invariant(runner)
