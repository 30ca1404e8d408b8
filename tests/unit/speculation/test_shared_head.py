"""Causal LMs as drafts that share the target's embedding and head: exact, small, trained apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, make
from engines import TOKENIZER, request, run, tokens_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from torch import Tensor
from training_records import TINY_VOCAB, training_record

from paceline.actors.engine.build import build_engine, build_stacks, draft_memory
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import AddExpert, SwapWeights
from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.weights.checkpoint import ModelError
from paceline.actors.weights.flat_weights import load_model, unflatten

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
CPU = torch.device("cpu")
# Fused and by module, with and without a head of the target's own.
KINDS = {
    "tied": ("llama", True),
    "untied": ("llama", False),
    "modules": ("phi3", False),
}


def save_kind(folder: Path, kind: str, seed: int, layers: int) -> Path:
    name, tied = KINDS[kind]
    config = ARCHITECTURES[name](layers, vocab_size=300, tie_word_embeddings=tied)
    make(config, seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def shared(folder: Path) -> Path:
    """The folder with ``head: shared``, and without embedding and head."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head": "shared"}))
    file = folder / "model.safetensors"
    state = {name: t for name, t in load_file(file).items() if name not in ENDS}
    save_file(state, file, metadata={"format": "pt"})
    return folder


def settings_of(tmp_path: Path, kind: str, **more: Any) -> TargetSettings:
    """A target of two layers; ``a`` is another model's layer, ``b`` the target's own layers."""
    target = save_kind(tmp_path / "target", kind, 1, 2)
    other = shared(save_kind(tmp_path / "other", kind, 2, 1))
    twin = shared(save_kind(tmp_path / "twin", kind, 1, 2))
    return TargetSettings(
        str(target), {"a": str(other), "b": str(twin)}, dtype="float32", device="cpu",
        num_threads=1, max_num_seqs=4, **more,
    )  # fmt: skip


def asked(**fields: Any) -> list[Any]:
    return [
        request(f"r{i}", [5 + i, 9, 11][: 1 + i], draft=draft, max_tokens=40 - 7 * i, **fields)
        for i, draft in enumerate(("a", "b", "a@0", "b"))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_targets_and_the_target_s_layers_are_always_accepted(
    tmp_path: Path, kind: str
) -> None:
    settings = settings_of(tmp_path, kind)
    fields = {"ignore_eos": True}
    plain = run(build_engine(settings)[0], asked(num_speculative_tokens=0, **fields))
    found = run(build_engine(settings)[0], asked(num_speculative_tokens=4, **fields))
    assert {n: tokens_of(o) for n, o in found.items()} == {
        n: tokens_of(o) for n, o in plain.items()
    }
    for name in ("r1", "r3"):  # embedding and head are the target's, or nothing would fit
        stats = found[name][-1].chunk.speculative
        assert stats is not None
        assert stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_are_the_target_s_own_tensors_and_no_part_of_a_version(
    tmp_path: Path, kind: str
) -> None:
    settings = settings_of(tmp_path, kind, canary_share=0.5)
    initial = load_model(settings.drafts["a"])
    assert not initial.index.keys() & set(ENDS)
    trunk = sum(
        t.numel() for t in load_file(Path(settings.drafts["a"], "model.safetensors")).values()
    )
    assert initial.nbytes == 4 * trunk
    engine = build_engine(settings)[0]
    target = engine._runner.models[0]  # type: ignore[attr-defined]
    proposer = engine.draft_runner._proposer  # type: ignore[attr-defined]
    models = [m for name in ("a", "b") for m in proposer._stacks[name].runner.models]
    assert len(models) == 6  # with the candidates' slots and the initial weights
    for model in models:
        assert model.get_input_embeddings().weight is target.get_input_embeddings().weight
        assert model.get_output_embeddings().weight.data_ptr() == (
            target.get_output_embeddings().weight.data_ptr()
        )
    weights = sum(p.nbytes for model in models for p in model.parameters())
    assert draft_memory(settings, torch.float32).weights == weights


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_are_the_trunk_s_alone_and_experts_can_be_added(
    tmp_path: Path, kind: str
) -> None:
    settings = settings_of(tmp_path, kind)
    engine = build_engine(settings)[0]
    first = {n: tokens_of(o) for n, o in run(engine, asked(num_speculative_tokens=4)).items()}
    engine.updates.put(AddExpert("c", "b"))
    other = save_kind(tmp_path / "again", kind, 7, 2)
    state = {n: t for n, t in load_file(other / "model.safetensors").items() if n not in ENDS}
    engine.updates.put(SwapWeights("b", 3, state))
    second = run(engine, asked(num_speculative_tokens=4))
    assert {n: tokens_of(o) for n, o in second.items()} == first
    stats = second["r1"][-1].chunk.speculative
    assert stats is not None
    assert (stats.weight_version, stats.draft_acceptance_rate < 1.0) == (3, True)
    added = run(engine, [request("n", [6, 9], draft="c", num_speculative_tokens=4)])["n"][-1]
    assert added.chunk.speculative is not None
    assert added.chunk.speculative.draft_acceptance_rate == 1.0


def test_a_pool_s_expert_reads_them_from_the_target_s_files(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "untied")
    target = load_file(Path(settings.model_path) / "model.safetensors")
    for stack in build_stacks(settings, torch.float32, CPU, 64):
        for model in stack.runner.models:
            assert torch.equal(model.get_input_embeddings().weight, target[ENDS[0]])
            assert torch.equal(model.get_output_embeddings().weight, target[ENDS[1]])


@pytest.fixture
def learner(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a target and a draft over the records' vocabulary."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    tiny_llama(1, vocab=TINY_VOCAB).save_pretrained(target)
    tiny_llama(2, vocab=TINY_VOCAB, layers=1).save_pretrained(draft)
    return target, shared(draft)


def own(distiller: Distiller) -> dict[str, Tensor]:
    draft = distiller._engine.module.draft
    tables = draft.get_input_embeddings().weight, draft.get_output_embeddings().weight
    return {n: t.clone() for n, t in (*draft.state_dict().items(), *zip(ENDS, tables, strict=True))}


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_training_changes_the_trunk_alone(learner: tuple[Path, Path], adapter: Any) -> None:
    target, draft = learner
    settings = DistillerSettings(
        learning_rate=1e-2, dtype="float32", device="cpu", adapter=adapter, lora_embeddings=True,
        target_path=str(target),
    )  # fmt: skip
    distiller = Distiller(str(draft), settings)
    batch = make_batch([training_record(number) for number in range(16)], 64)
    before = own(distiller)
    assert torch.equal(before[ENDS[0]], load_file(target / "model.safetensors")[ENDS[0]])
    losses = [distiller.micro_step(batch).loss for _ in range(30)]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[0]
    published = distiller.state_dict()
    assert published.keys() == load_model(draft).index.keys()
    assert all(torch.equal(before[end], own(distiller)[end]) for end in ENDS)
    changed = [n for n, t in published.items() if not torch.equal(t, before[n].to(t.dtype))]
    assert len(changed) >= 7
    served = distiller.served(published)
    assert torch.equal(served.get_output_embeddings().weight, before[ENDS[0]])
    distiller.reset(unflatten(load_model(draft)))
    assert all(torch.equal(own(distiller)[name], before[name]) for name in before)


@pytest.mark.usefixtures("deepspeed")
def test_a_draft_without_its_target_is_refused(learner: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="cannot be loaded without its target"):
        Distiller(str(learner[1]), DistillerSettings(dtype="float32", device="cpu"))
