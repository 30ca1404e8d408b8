"""The models of the repository are those that their cards describe, and they load."""

import json
import re
from pathlib import Path

import pytest
import torch
from fixture_models import DRAFT, ROUTER, TARGET
from fixtures.recipes import cards as fixture_cards
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.deploy.config.config import MODELS_DIR
from paceline.deploy.recipes import cards

FOLDERS = [TARGET, DRAFT, ROUTER, MODELS_DIR / "router-minilm"]
every_model = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@every_model
def test_the_card_names_the_hash_of_every_file(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    listed = {file: digest for digest, file in re.findall(r"^([0-9a-f]{64})  (\S+)$", card, re.M)}
    files = {path.name for path in folder.iterdir()} - {"README.md"}
    assert listed.keys() == files
    assert any(name.endswith(".safetensors") for name in files)
    for file, digest in listed.items():
        assert cards.sha256(folder / file) == digest, file


@every_model
def test_the_card_is_what_figures_and_files_give(folder: Path, tmp_path: Path) -> None:
    (copy := tmp_path / folder.name).mkdir()
    for source in folder.iterdir():
        if source.suffix != ".md":
            (copy / source.name).symlink_to(source)
    figures = json.loads((folder.parent / cards.FIGURES_FILE).read_text())
    (tmp_path / cards.FIGURES_FILE).write_text(json.dumps({folder.name: figures[folder.name]}))
    cards.write_cards(tmp_path, {**cards.CARDS, **fixture_cards.CARDS})
    assert (copy / "README.md").read_text() == (folder / "README.md").read_text()


def test_all_models_together_stay_small() -> None:
    assert sum(p.stat().st_size for folder in FOLDERS for p in folder.iterdir()) <= 45e6


@every_model
def test_no_model_is_a_pickle(folder: Path) -> None:
    kept = {".safetensors", ".json", ".jinja", ".md"}
    assert {p.suffix for p in folder.iterdir()} <= kept


def test_target_and_draft_share_a_vocabulary_and_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    other = AutoTokenizer.from_pretrained(DRAFT)
    assert tokenizer.get_vocab() == other.get_vocab()
    chat = [{"role": "user", "content": "Tom has 3 hats and buys 4 more. How many has he?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    for folder in (TARGET, DRAFT):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        with torch.inference_mode():
            assert torch.isfinite(model(input_ids=ids).logits).all()
    assert model.num_parameters() < 2e6
