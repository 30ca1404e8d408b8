"""Logits that training and judging see, against the causal LM's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, make
from replay_samples import make_record
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record
from transformers import CohereConfig, Gemma2Config, GraniteConfig

from paceline.actors.training.adapters import Adapters
from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.forward import logits_at
from paceline.actors.training.optimizer_state import OptimizerState, parameter_groups
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.shares import make_shares

BATCH = make_batch([make_record(length=5), make_record(length=8, seed=2)], 64)
CONFIGS = {
    **{name: (lambda name=name: ARCHITECTURES[name](2)) for name in ARCHITECTURES},
    "granite": lambda: GraniteConfig(**SIZES, num_hidden_layers=2, logits_scaling=8.0),
    "cohere": lambda: CohereConfig(**SIZES, num_hidden_layers=2, logit_scale=0.0625),
    "capped": lambda: Gemma2Config(
        **SIZES, num_hidden_layers=2, head_dim=8, final_logit_softcapping=1.0
    ),
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_models_own(name: str, adapted: bool) -> None:
    model = make(CONFIGS[name](), 0)
    if adapted:
        adapters = Adapters(model, 4, 8.0, embeddings=True)
        with torch.no_grad():
            for parameter in adapters.parameters():
                parameter.add_(0.01)
    with torch.no_grad():
        expected = model(BATCH.input_ids).logits[BATCH.rows, BATCH.columns]
        torch.testing.assert_close(logits_at(model, BATCH), expected, atol=1e-5, rtol=1e-5)
        assert model(BATCH.input_ids).logits.shape[:2] == BATCH.input_ids.shape


def test_matrices_alone_are_decayed() -> None:
    for name, config in CONFIGS.items():
        model = make(config(), 0)
        groups = parameter_groups(model, list(model.parameters()), 0.3)
        decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        assert id(embedding) not in decayed
        assert (id(head) in decayed) is (head is not embedding), name
        for own, parameter in model.named_parameters():
            if own.endswith("bias") or "norm" in own.split(".")[-2]:
                assert id(parameter) not in decayed, own


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norms_stay_at_rest(tmp_path: Path, stage: int) -> None:
    """Without any gradient the decay alone moves weights: matrices, and nothing else."""
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(tmp_path)
    settings = DistillerSettings(
        dtype="float32", device="cpu", learning_rate=1e-2, average_decay=0.0, zero_stage=stage
    )
    distiller = Distiller(str(tmp_path), settings)
    [share] = make_shares(
        [make_batch([training_record(n) for n in range(4)], 64)], settings.objective
    )
    share = dataclasses.replace(share, weights=torch.zeros_like(share.weights))
    optimizer = distiller._engine.basic_optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    before = {n: w.clone() for n, w in distiller._engine.module.draft.state_dict().items()}
    for _ in range(40 * settings.accumulation):
        distiller.learn(share)
    after = distiller._engine.module.draft.state_dict()
    ratio = {n: float(after[n].norm() / w.norm()) for n, w in before.items()}
    kept = distiller.optimizer_state()
    # A state of one group, as older versions wrote it.
    old = {n: t for n, t in kept.tensors.items() if n.startswith("0.")}
    with pytest.raises(ValueError, match="of another draft"):
        distiller.resume(OptimizerState(old, 3))
    distiller.resume(kept)
    assert distiller.steps == kept.steps
    for name, value in ratio.items():
        if "norm" in name or "embed" in name or "lm_head" in name:
            assert value == pytest.approx(1.0, abs=1e-6), name
        else:
            assert value < 0.99, name
