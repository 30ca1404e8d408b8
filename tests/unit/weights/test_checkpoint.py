"""What a model folder holds is what is served, trained and rolled back to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import deepspeed_process
import pytest
import torch
from architectures import ARCHITECTURES, make
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_llama
from transformers import AutoModelForCausalLM

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.checkpoint import ModelError, check_tensors, tied_names
from paceline.actors.weights.flat_weights import load_model, unflatten

State = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def edited(folder: Path, change: Callable[[State], object], **config: object) -> Path:
    """A tiny model's folder with other tensors and config fields."""
    save_tiny(folder, 1)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def nothing(state: State) -> None:
    """Change no tensor."""


def own_head(state: State) -> None:
    state[HEAD] = torch.randn(state[EMBEDDING].shape, generator=torch.Generator().manual_seed(5))


def same_head(state: State) -> None:
    state[HEAD] = state[EMBEDDING].clone()


def further_layer(state: State) -> None:
    state[DOWN.replace("1", "2")] = state[DOWN].clone()


def bare(state: State) -> None:
    """Names as the body alone saves them."""
    for name in list(state):
        state[name.removeprefix("model.")] = state.pop(name)


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda state: state.pop(DOWN), {}, f"its files lack {DOWN}"),
        (lambda state: state.update({DOWN: torch.zeros(3, 4)}), {}, f"wrong shape of {DOWN}"),
        (nothing, {"num_hidden_layers": 3}, "and 6 more"),
        (nothing, {"tie_word_embeddings": False}, f"its files lack {HEAD}"),
        (
            lambda s: s.update({DOWN.replace("1", "2"): s[DOWN].clone()}),
            {},
            "fewer layers than the files",
        ),
    ],
)
def test_what_the_files_lack_is_named_by_check_and_load_alike(
    tmp_path: Path, change: Callable[[State], object], config: dict[str, object], said: str
) -> None:
    folder = edited(tmp_path / "model", change, **config)
    with pytest.raises(ModelError) as checked:
        check_tensors(folder, "target")
    with pytest.raises(ModelError) as loaded:
        load_causal_lm(folder, torch.float32)
    assert str(checked.value).startswith("target: ")
    assert said in str(checked.value)
    assert "\n" not in str(checked.value)
    assert str(loaded.value).removeprefix(str(folder)) == str(checked.value).removeprefix("target")


@pytest.mark.parametrize(
    ("change", "config", "tied"),
    [
        (nothing, {}, True),
        (same_head, {}, True),
        (own_head, {}, False),
        (own_head, {"tie_word_embeddings": False}, False),
        (bare, {}, True),
        (lambda state: state.update(vision=torch.zeros(2)), {}, True),
    ],
)
def test_serving_training_and_version_0_have_the_weights_that_transformers_loads(
    tmp_path: Path, change: Callable[[State], object], config: dict[str, object], tied: bool
) -> None:
    deepspeed_process.use_deepspeed()
    from paceline.actors.training.distiller import Distiller
    from paceline.actors.training.settings import DistillerSettings

    folder = edited(tmp_path / "model", change, **config)
    check_tensors(folder, "draft")
    ids = torch.tensor([[1, 40, 41, 42]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(
            ids
        ).logits
        model = load_causal_lm(folder, torch.float32, attention="eager")
        assert torch.equal(model(ids).logits, expected)
        assert (HEAD in tied_names(model)) == tied
        distiller = Distiller(str(folder), DistillerSettings(dtype="float32", device="cpu"))
        assert torch.equal(distiller.served(None)(ids).logits, expected)
        learnt = distiller.state_dict()
        assert (HEAD in learnt) == (not tied)
        initial = unflatten(load_model(folder))
        assert learnt.keys() == initial.keys()
        assert torch.equal(distiller.served(initial)(ids).logits, expected)
    # What the trainer publishes, and what an operator goes back to, is what a replica takes.
    settings = TargetSettings(
        str(save_tiny(tmp_path / "target", 2)),
        {"general": str(folder)},
        dtype="float32",
        num_threads=1,
        max_num_seqs=2,
    )
    engine, _, _ = build_engine(settings)
    for version, state in ((7, learnt), (8, initial)):
        engine.updates.put(SwapWeights("general", version, state))
        engine.step()
        assert engine.drafts() == {"general": version, "general@0": 0}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_is_checked_by_its_own_names(tmp_path: Path, kind: str) -> None:
    """Also those whose files name or split tensors differently from the model."""
    make(ARCHITECTURES[kind](2), 1).save_pretrained(tmp_path)
    check_tensors(tmp_path, "target")
    state = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(state) if "layers.1." in name or "h.1." in name)
    del state[name]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack|do not make up the model"):
        check_tensors(tmp_path, "target")


def test_tied_names_are_those_of_a_shared_parameter() -> None:
    model = tiny_llama(1)
    assert tied_names(model) == {HEAD}
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert tied_names(model) == set()


def test_a_replica_refuses_weights_without_an_untied_head(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", own_head)
    settings = TargetSettings(str(folder), {"general": str(folder)}, dtype="float32", num_threads=1)
    engine, _, _ = build_engine(settings)
    state = unflatten(load_model(folder))
    del state[HEAD]
    engine.updates.put(SwapWeights("general", 3, state))
    engine.step()
    assert engine.drafts()["general"] == 0
