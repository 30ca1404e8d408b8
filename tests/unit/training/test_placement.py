"""Serving, learning and publishing find the tensors of an operation on one device.

With a pretended GPU, which has the CPU's values: what is computed there must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import run, tokens_of
from fixture_models import TARGET
from llguidance import LLMatcher
from pretended_gpu import pretended_gpu
from tiny_models import save_tiny, tiny_llama, tiny_tokenizer

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training import draft_maker
from paceline.actors.training.batches import make_batch
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.draft_maker import DraftMaker, MakerSettings
from paceline.actors.training.draft_start import start_linear
from paceline.actors.training.eagle import state_basis
from paceline.actors.training.expert_evaluation import ExpertEvaluator
from paceline.actors.training.settings import DistillerSettings, ScorerSettings, TrainerSettings
from paceline.actors.weights.eagle import load_draft, new_draft, read_draft, save_draft
from paceline.actors.weights.flat_weights import flatten

pytestmark = pytest.mark.usefixtures("deepspeed")

VOCAB = len(tiny_tokenizer())
GRAMMAR = LLMatcher.grammar_from_regex("[a-z]{4,12} end")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "unseeded": {"temperature": 0.8, "top_k": 20},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0),)},
    "constrained": {"temperature": 0.0, "grammar": GRAMMAR},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and a draft of either kind."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "target", 1, vocab=VOCAB)
    draft = new_draft(folder / "target")
    torch.nn.init.normal_(draft.fuse.weight, std=0.2)
    save_draft(draft, folder / "eagle")
    tiny_llama(2, layers=1, vocab=VOCAB).save_pretrained(folder / "causal")
    return {name: str(folder / name) for name in ("target", "eagle", "causal")}


def engine_on(folders: dict[str, str]) -> Engine:
    """An engine with both drafts, on the device that ``auto`` chooses."""
    drafts = {name: folders[name] for name in ("eagle", "causal")}
    settings = TargetSettings(
        folders["target"],
        drafts,
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        num_speculative_tokens=3,
        cuda_graphs=False,
        canary_share=0.5,
        seed=1,
    )
    return build_engine(settings)[0]


def answers(engine: Engine, **fields: Any) -> tuple[list[list[int]], list[ReplayRecord]]:
    grammar = fields.pop("grammar", None)
    params = SamplingParams(16, ignore_eos=grammar is None, **fields)
    asked = [
        GenerationRequest(
            f"{draft}{i}",
            tuple(range(5, 20 - 3 * i)),
            params,
            draft=draft,
            topic=draft,
            grammar=grammar,
            token_sources=True,
        )
        for i, draft in enumerate(["eagle", "causal", "eagle"])
    ]
    found = run(engine, asked)
    records = [found[request.request_id][-1].record for request in asked]
    return (
        [tokens_of(found[request.request_id]) for request in asked],
        [record for record in records if record is not None],
    )


@pytest.fixture(scope="module")
def records(folders: dict[str, str]) -> list[ReplayRecord]:
    engine = engine_on(folders)
    rounds = [answers(engine, temperature=1.0, seed=seed)[1] for seed in range(4)]
    return [record for each in rounds for record in each]


def test_a_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with pretended_gpu():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert (there + 1).device.type == (here.to(there.device) - there).device.type == "cuda"
        assert here.device.type == there.cpu().device.type == "cpu"
        refused: list[Callable[[], object]] = [
            lambda: there + here,
            lambda: torch.cat([there, here]),
            there.numpy,
            lambda: torch.rand(3, generator=torch.Generator().manual_seed(0), device="cuda"),
            lambda: torch.nn.Linear(3, 3).to("cuda")(here),
        ]
        for call in refused:
            with pytest.raises((RuntimeError, TypeError), match="device"):
                call()


SLOW = ("seeded", "penalised", "unseeded")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.full) if k in SLOW else k for k in SAMPLING]
)
def test_an_engine_answers_there_as_here(folders: dict[str, str], kind: str) -> None:
    """Unseeded answers follow the generator, which is the device's own."""
    expected, _ = answers(engine_on(folders), **SAMPLING[kind])
    with pretended_gpu():
        found, kept = answers(engine_on(folders), **SAMPLING[kind])
    assert [record.hidden is not None for record in kept] == [True] * 3
    if kind != "unseeded":
        assert found == expected


@pytest.mark.parametrize("draft", ["eagle", "causal"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_draft_is_trained_compared_published_and_resumed_there(
    folders: dict[str, str],
    records: list[ReplayRecord],
    draft: str,
    adapter: Any,
    tmp_path: Path,
) -> None:
    distiller = DistillerSettings(
        dtype="float32", target_path=folders["target"], adapter=adapter, average_decay=0.9
    )
    settings = TrainerSettings({draft: folders[draft]}, distiller, optimizer_dir=str(tmp_path))
    with pretended_gpu():
        candidate = Candidate(draft, settings)
        assert candidate._distiller.device.type == "cuda"
        for share in candidate.make_shares([records]) * 3:
            loss = candidate.learn(share).loss
        candidate.test(records, lambda: None)
        found = candidate.compare(records, lambda: None)
        candidate.add_basis(found.state, records, lambda: None)
        candidate.coverage(records)
        candidate.grow_vocabulary(records)
        candidate.mark_published(1, found.state, records, found.scores)
        flat = flatten(found.state)
        candidate.load(1, flat)
        assert candidate.steps == 3
        scorer = ExpertEvaluator(
            ScorerSettings({draft: folders[draft]}, {}, target_path=folders["target"])
        )
        scores = scorer.score(draft, flat, records, lambda: None)
    assert np.isfinite([loss, *found.scores, *found.served, *scores]).all()
    assert {tensor.device.type for tensor in found.state.values()} == {"cpu"}


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_draft_starts_and_gets_its_basis_on_its_device(
    folders: dict[str, str], records: list[ReplayRecord], where: str
) -> None:
    """Of records, which are on the CPU."""
    found = []
    for context, device in ((nullcontext(), "cpu"), (pretended_gpu(), where)):
        with context:
            draft = load_draft(
                folders["eagle"], folders["target"], torch.float32, torch.device(device)
            )
            start_linear(draft, records, 96)
            basis = state_basis(draft, [make_batch(records, 96)])
            found.append((draft.fuse.weight.detach().cpu(), (basis.T @ basis).cpu()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.full
def test_a_draft_is_made_there_with_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GPU_PROMPTS", "_GPU_SEQUENCES", "_PROMPT_TOKENS", "_ANSWER_TOKENS"):
        monkeypatch.setattr(draft_maker, name, 16)
    for name in ("_GPU_STEPS", "_GPU_MICRO_BATCH", "_FIRST_RECORDS"):
        monkeypatch.setattr(draft_maker, name, 2)
    monkeypatch.setattr("paceline.actors.engine.build._graph_tokens", lambda _: 0)
    seconds = count()
    with pretended_gpu():
        maker = DraftMaker(MakerSettings(str(TARGET), tmp_path, 4.0), lambda: float(next(seconds)))
        maker.run()
        assert maker.progress.steps > 0
        assert maker._effort(0.0).tokens is None
        maker.write()
    assert read_draft(tmp_path).has_basis
