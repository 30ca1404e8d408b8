"""The models that the package carries are those that their cards describe, and they load."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline.deploy
from paceline.deploy.recipes.cards import NAMES, write_cards
from paceline.deploy.recipes.checkpoints import sha256

MODELS = Path(paceline.deploy.__file__).parent / "models"


@pytest.mark.parametrize("name", NAMES)
def test_the_card_names_the_hash_of_every_file(name: str) -> None:
    card = (MODELS / name / "README.md").read_text()
    listed = {file: digest for digest, file in re.findall(r"^([0-9a-f]{64})  (\S+)$", card, re.M)}
    files = {path.name for path in (MODELS / name).iterdir()} - {"README.md"}
    assert listed.keys() == files
    assert "model.safetensors" in files
    for file, digest in listed.items():
        assert sha256(MODELS / name / file) == digest, file


@pytest.mark.parametrize("name", NAMES)
def test_the_card_is_what_figures_and_files_give(name: str, tmp_path: Path) -> None:
    for source in MODELS.rglob("*"):
        if source.is_file() and source.suffix != ".md":
            copy = tmp_path / source.relative_to(MODELS)
            copy.parent.mkdir(exist_ok=True)
            copy.symlink_to(source)
    write_cards(tmp_path)
    assert (tmp_path / name / "README.md").read_text() == (MODELS / name / "README.md").read_text()


def test_all_models_together_stay_small() -> None:
    assert sum(p.stat().st_size for p in MODELS.rglob("*") if p.is_file()) <= 45e6


def test_no_model_is_a_pickle() -> None:
    kept = {".safetensors", ".json", ".jinja", ".md"}
    assert {p.suffix for p in MODELS.rglob("*") if p.is_file()} <= kept


def test_target_and_draft_share_a_vocabulary_and_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    other = AutoTokenizer.from_pretrained(MODELS / "draft-general")
    assert tokenizer.get_vocab() == other.get_vocab()
    chat = [{"role": "user", "content": "Tom has 3 hats and buys 4 more. How many has he?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    for name in ("target", "draft-general"):
        model = AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        with torch.inference_mode():
            assert torch.isfinite(model(input_ids=ids).logits).all()
    assert model.num_parameters() < 2e6
