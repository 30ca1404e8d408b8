"""`drafts.general: auto`: which draft it is, and when one is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from tiny_models import save_tiny, tiny_tokenizer
from transformers import AutoModelForCausalLM

from paceline.actors.weights.eagle import is_made_for, new_draft, save_draft
from paceline.actors.weights.state_folder import fingerprint, fingerprints
from paceline.deploy import model_store
from paceline.deploy.config.config import MODELS_DIR, PacelineConfig, load_config
from paceline.deploy.config.preflight import check_models_fit
from paceline.deploy.draft_store import fetch_models, share_draft
from paceline.deploy.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "target", 1)


def config_of(target: Path, **more: object) -> PacelineConfig:
    return load_config(None, {"target.path": str(target), "router.enabled": False, **more})


def test_an_untrained_draft_is_made_once_and_again_for_another_target(target: Path) -> None:
    said: list[str] = []
    config = fetch_models(config_of(target), said.append)
    assert len(said) == 1
    assert config.draft_paths["sql"] == config.auto_draft
    assert not config.made_draft.exists(), "an untrained draft does not stand in for a made one"
    assert is_made_for(config.auto_draft, target)
    check_models_fit(config)
    fetch_models(config, said.append)
    assert len(said) == 1
    save_tiny(target, 2)
    assert not is_made_for(config.auto_draft, target)
    fetch_models(config, said.append)
    assert len(said) == 2
    check_models_fit(config)


def test_a_draft_that_has_learnt_is_never_written_over(target: Path) -> None:
    config = config_of(target)
    save_draft(new_draft(target), config.made_draft)
    before = (config.made_draft / "model.safetensors").read_bytes()
    save_tiny(target, 2)
    with pytest.raises(ConfigError, match="was made for other weights than those in"):
        fetch_models(config, lambda _: None)
    assert (config.made_draft / "model.safetensors").read_bytes() == before


def test_a_folder_called_like_a_packaged_model_is_the_users_own(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target.rename(tmp_path / "smollm2")
    files = {file: file.read_bytes() for file in (tmp_path / "smollm2").iterdir()}
    config = config_of(Path("smollm2"))
    assert config.learnt_draft is None
    fetch_models(config, lambda _: None)
    assert {file: file.read_bytes() for file in (tmp_path / "smollm2").iterdir()} == files


def test_the_hosts_of_a_cluster_read_one_draft_whatever_was_made_on_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache folder is each host's own."""
    storage = tmp_path / "storage"
    config = fetch_models(config_of(target, **{"weights.storage": str(storage)}), lambda _: None)
    made, shared = config.auto_draft, share_draft(config)
    save_draft(new_draft(target, layers=2), config.made_draft)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "another host's cache"))
    assert set(shared.draft_paths.values()) == {storage / "drafts" / fingerprint([made])}
    assert fingerprints(target, shared.draft_paths) == fingerprints(
        target, dict.fromkeys(shared.experts, made)
    )
    check_models_fit(shared)
    assert share_draft(shared) == shared


def test_a_draft_that_was_made_anew_leaves_the_shared_one_to_its_readers(
    target: Path, tmp_path: Path
) -> None:
    storage = {"weights.storage": str(tmp_path / "storage")}
    config = fetch_models(config_of(target, **storage), lambda _: None)
    first = share_draft(config)
    save_draft(new_draft(target, layers=2), config.made_draft)
    second = share_draft(config)
    assert first.draft_paths != second.draft_paths
    check_models_fit(first)
    check_models_fit(second)
    assert share_draft(config) == second


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs"),
        lambda folder: change(folder, hidden_size="many"),
        lambda folder: change(folder, num_attention_heads=0),
        lambda folder: change(folder, rope_parameters={"rope_type": "linear"}),
    ],
)
def test_a_damaged_target_is_an_error_of_one_line(
    damage: Callable[[Path], object], target: Path
) -> None:
    damage(target)
    with pytest.raises(ConfigError, match=r"^target: .*") as caught:
        check_models_fit(fetch_models(config_of(target), lambda _: None))
    assert len(str(caught.value).splitlines()) == 1


def change(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_packaged_targets_draft_is_found_by_name_and_by_folder(target: Path) -> None:
    folder = model_store.locate("smollm2")
    shipped = MODELS_DIR / "draft-smollm2"
    assert config_of(Path("smollm2")).auto_draft == config_of(folder).auto_draft == shipped
    made = config_of(folder).made_draft
    save_draft(new_draft(target), made)
    assert config_of(Path("smollm2")).auto_draft == made


def test_a_target_of_which_none_can_be_made_is_served_plain(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(ARCHITECTURES["gpt2"](1)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    said: list[str] = []
    config = fetch_models(config_of(folder), said.append)
    assert said == ["No draft can be made for models of type gpt2: serving without drafts"]
    assert config.drafts.experts == ()
    assert not config.training.enabled


def test_a_draft_of_another_target_or_ahead_of_it_is_refused(target: Path, tmp_path: Path) -> None:
    made = fetch_models(config_of(target), lambda _: None).auto_draft
    other = save_tiny(tmp_path / "other", 3)
    with pytest.raises(ConfigError, match="was made for another target"):
        check_models_fit(config_of(other, **{"drafts.general": str(made)}))
    pool = {"drafts.placement": "pool"}
    check_models_fit(config_of(target, **pool))
    with pytest.raises(ConfigError, match=r"drafts\.draft_ahead: general is an EAGLE draft"):
        check_models_fit(config_of(target, **pool, **{"drafts.draft_ahead": "on"}))
    (made / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=str(made)):
        check_models_fit(config_of(target))
