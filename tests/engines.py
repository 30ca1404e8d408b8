"""Engines over tiny random models, and what tests ask of them."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tiny_models import tiny_llama, tiny_tokenizer

from paceline.actors.engine.attention import ATTENTION_NAME
from paceline.actors.engine.decoders import vocab_rows
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import EngineSettings
from paceline.actors.speculation.colocated import ColocatedProposer, DraftStack
from paceline.actors.speculation.draft_runner import DraftRunner
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.suffix.arm import SuffixArm

TOKENIZER = tiny_tokenizer()
MAX_LEN = 96
# `make test-gpu` has the engine's own tests run their models there.
DEVICE = torch.device(os.environ.get("PACELINE_TEST_DEVICE", "cpu"))


def served(model: Any) -> Any:
    model.set_attn_implementation(ATTENTION_NAME)
    return model.to(DEVICE)


def make_engine(
    *,
    target_seed: int = 1,
    draft_seed: int = 2,
    max_num_seqs: int = 4,
    k: int = 4,
    eos: int = 2,
    vocab: int = 300,
    seed: int = 0,
    prefill_chunk: int = 8,
    support: int = 16,
    prefix_cache: bool = True,
    kv_positions: int | None = None,
    draft_positions: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **model: Any,
) -> Engine:
    """An engine with the experts a and b, and a's initial weights."""
    target = served(tiny_llama(target_seed, vocab=vocab, **model))
    seeds = {"a": draft_seed, "b": draft_seed + 1, "a@0": draft_seed}
    drafts = {name: served(tiny_llama(s, layers=1, vocab=vocab)) for name, s in seeds.items()}
    return engine_of(
        target,
        [drafts],
        max_num_seqs=max_num_seqs,
        k=k,
        eos=eos,
        seed=seed,
        prefill_chunk=prefill_chunk,
        support=support,
        prefix_cache=prefix_cache,
        kv_positions=kv_positions,
        draft_positions=draft_positions,
        clock=clock,
    )


def engine_of(
    target: Any,
    drafts: Iterable[Mapping[str, Any]],
    *,
    max_num_seqs: int = 4,
    k: int | None = 4,
    eos: int = 2,
    seed: int = 0,
    prefill_chunk: int = 8,
    support: int = 16,
    prefix_cache: bool = True,
    kv_positions: int | None = None,
    draft_positions: int | None = None,
    canary_share: float = 0.0,
    beside: Callable[[ModelRunner], Sequence[DraftStack]] | None = None,
    record_hidden: bool = False,
    policy: GoodputPolicy | None = None,
    suffixes: SuffixArm | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """An engine over served models; drafts of one architecture share a mapping.

    ``beside`` makes the drafts that read the target's hidden states.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    stacks = [
        ExpertStack(
            ModelRunner(
                [*group.values()],
                max_num_seqs,
                MAX_LEN,
                draft_positions,
                vocab_size=vocab_rows(target),
            ),
            [*group],
            max_num_seqs,
        )
        for group in drafts
    ]
    settings = EngineSettings(
        max_num_seqs,
        MAX_LEN,
        k,
        8,
        prefill_chunk,
        frozenset({eos}),
        prefix_cache,
        canary_share=canary_share,
        record_hidden=record_hidden,
        suffix_drafts=suffixes is not None,
    )
    keep = beside is not None
    runner = ModelRunner([target], max_num_seqs, MAX_LEN, kv_positions, keep_hidden=keep)
    reading = [] if beside is None else beside(runner)
    return Engine(
        runner=runner,
        draft_runner=DraftRunner(
            ColocatedProposer([*stacks, *reading], support, generator),
            policy,
            target.device,
            clock,
            suffixes,
        ),
        tokenizer=TOKENIZER,
        settings=settings,
        generator=generator,
        now=lambda: 1234.5,
    )


def use_proposer(engine: Engine, proposer: Any) -> None:
    """Draft with another proposer from now on."""
    runner = engine.draft_runner
    for part in (runner, runner._controller, runner.updates):
        part._proposer = proposer


def twin_engine(k: int = 3, **more: Any) -> Engine:
    """A draft with the target's own weights: greedy, everything is accepted."""
    target = tiny_llama(1)
    return engine_of(served(target), [{"a": served(copy.deepcopy(target))}], k=k, **more)


def request(name: str, prompt: Sequence[int], **fields: Any) -> GenerationRequest:
    sampling = {"max_tokens": 20, "temperature": 0.0}
    own = {"draft": "a", "topic": "sql"}
    for key, value in fields.items():
        (sampling if key in SamplingParams.__dataclass_fields__ else own)[key] = value
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling), **own)  # type: ignore[arg-type]


def run(
    engine: Engine, requests: Iterable[GenerationRequest] = (), *, draft_failures: bool = False
) -> dict[str, list[StepOutput]]:
    """Run to the end; outputs by request. Rounds whose drafts failed must be expected."""
    for r in requests:
        engine.add(r)
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            assert draft_failures or engine.draft_failures == 0
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.chunk.token_ids]
