"""What is compared: Paceline's modes and the peers, each as the command that serves it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from held import environment

from peers.environments import (
    LLAMA_CPP,
    OPENVINO,
    VLLM,
    Environment,
    PeerError,
    native_llama,
    python_of,
)
from peers.weights import bf16_gguf, checkpoint, openvino_ir, own_gguf

HOSTS = Path(__file__).parent / "hosts"
MODEL_NAME = "paceline"  # what requests name
PLAIN, ALONE = "Paceline, no drafts", "Paceline's engine alone, no drafts"
DAY0 = "Paceline, day-0 draft and suffixes of the request"
SUFFIX = "Paceline, suffixes of the request alone"
AUTO, LEARNT = "Paceline, defaults", "Paceline, defaults after a lesson"
LLAMA_BF16 = "llama.cpp, bf16"


@dataclass(frozen=True)
class Setup:
    """What every server gets.

    Attributes:
        target: its folder.
        threads: of each.
        slots: requests at once at most.
        context: tokens of a request at most.
        draft: folder of a draft model for the peers; None if there is none.
        work: folder of configurations, states and logs of this run.
        lesson: prompts as token ids, see ``Peer.learns``.
    """

    target: Path
    threads: int
    slots: int
    context: int
    draft: Path | None
    work: Path
    lesson: Sequence[Sequence[int]] = ()


Command = Callable[[Setup, int], list[str]]


@dataclass(frozen=True)
class Peer:
    """A way to serve the target.

    Attributes:
        name: shown.
        command: of its server, from the setup and a port. It raises PeerError if it cannot be had.
        environment: what it runs in; None is Paceline's own.
        same_weights: bfloat16 and plain decoding, so that its speed is that of its kernels.
        most: requests in flight that it takes at once.
        main: whether it is part of a quick run.
        body: fields that its requests need.
        variables: of its process.
        over_http: False is driven through its standard input.
        ours: whether it is Paceline.
        learns: whether it serves the lesson before it is measured.
    """

    name: str
    command: Command
    environment: Environment | None = None
    same_weights: bool = False
    most: int = 1000
    main: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    over_http: bool = True
    ours: bool = False
    learns: bool = False


_NO_DRAFTS = {"general": "none", "suffix": "off"}


def _paceline(name: str, threads: int | None = None, **sections: Any) -> Command:
    """``paceline serve`` with these sections of its configuration."""

    def command(setup: Setup, port: int) -> list[str]:
        file = _configuration(setup, name, port, threads or setup.threads, sections)
        return [sys.executable, "-m", "paceline.deploy.cli.main", "serve", str(file)]

    return command


def _alone(setup: Setup, port: int) -> list[str]:
    sections = {"drafts": _NO_DRAFTS}
    file = _configuration(setup, "alone", port, setup.threads, sections)
    return [sys.executable, str(HOSTS / "engine_alone.py"), str(file)]


def _configuration(
    setup: Setup, name: str, port: int, threads: int, sections: Mapping[str, Any]
) -> Path:
    """A file for ``paceline serve``, with a fresh state unless the sections name one."""
    state = setup.work / f"{name}-state"
    if "state_dir" not in sections:
        shutil.rmtree(state, ignore_errors=True)
    target = {
        "path": str(setup.target),
        "num_threads": threads,
        "max_num_seqs": setup.slots,
        "max_model_len": setup.context,
    }
    ray = {"dashboard": False, "object_store_mb": 200}
    common = {"port": port, "model_name": MODEL_NAME, "target": target, "ray": ray}
    file = setup.work / f"{name}.yaml"  # JSON is YAML
    file.write_text(json.dumps(common | {"state_dir": str(state)} | sections), encoding="utf-8")
    return file


def _llama(
    weights: Callable[[Path], Path], *options: str, draft: bool = False, threads: int | None = None
) -> Command:
    def command(setup: Setup, port: int) -> list[str]:
        python = python_of(LLAMA_CPP)
        own = [*options, *(["--draft", str(bf16_gguf(_draft(setup)))] if draft else [])]
        limits = ["--slots", str(setup.slots), "--context", str(setup.context)]
        command = [str(python), str(HOSTS / "serve_llamacpp.py"), str(weights(setup.target))]
        return [*command, *_common(setup, port, threads), *limits, *own]

    return command


def _native_llama(weights: Callable[[Path], Path]) -> Command:
    def command(setup: Setup, port: int) -> list[str]:
        limits = ["--parallel", str(setup.slots), "--ctx-size", str(setup.slots * setup.context)]
        command = [str(native_llama()), "--model", str(weights(setup.target)), *limits]
        return [*command, *_common(setup, port), "--host", "127.0.0.1", "--offline"]

    return command


def _openvino(weight_format: str, *options: str, draft: bool = False) -> Command:
    def command(setup: Setup, port: int) -> list[str]:
        python, model = python_of(OPENVINO), openvino_ir(setup.target, weight_format)
        own = [*options]
        if draft:
            own += ["--draft", str(openvino_ir(_draft(setup), weight_format))]
        command = [str(python), str(HOSTS / "serve_openvino.py"), str(model)]
        return [*command, *_common(setup, port), "--slots", str(setup.slots), *own]

    return command


def _transformers(mode: str) -> Command:
    def command(setup: Setup, port: int) -> list[str]:
        own = ["--mode", mode, *(["--draft", str(_draft(setup))] if mode == "draft" else [])]
        limits = ["--slots", str(setup.slots), "--context", str(setup.context)]
        command = [sys.executable, str(HOSTS / "serve_transformers.py")]
        command += [str(checkpoint(setup.target))]
        return [*command, *_common(setup, port), *limits, *own]

    return command


def _vllm(**speculative: Any) -> Command:
    def command(setup: Setup, port: int) -> list[str]:
        command = [str(python_of(VLLM)), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(checkpoint(setup.target)), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", str(setup.context), "--max-num-seqs", str(setup.slots)]
        command += ["--generation-config", "vllm", "--kv-cache-memory-bytes", str(2**29)]
        own = ["--speculative-config", json.dumps(speculative)] if speculative else []
        return [*command, *own]

    return command


def _draft(setup: Setup) -> Path:
    if setup.draft is None:
        raise PeerError("no draft model with the target's vocabulary was given: --draft FOLDER")
    return setup.draft


def _common(setup: Setup, port: int, threads: int | None = None) -> list[str]:
    return ["--port", str(port), "--threads", str(threads or setup.threads)]


_ALONE = {"OMP_WAIT_POLICY": "passive"}  # as `paceline serve` sets it for its processes
_BODY = {"model": MODEL_NAME, "return_token_ids": True}
_OURS: dict[str, Any] = {"ours": True, "body": _BODY}
_LLAMA: dict[str, Any] = {"environment": LLAMA_CPP}
_OPENVINO: dict[str, Any] = {"environment": OPENVINO}
_VLLM: dict[str, Any] = {
    "environment": VLLM,
    "body": _BODY,
    "variables": {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
}
_NO_TRAINING = {"training": {"enabled": False}}

PEERS: tuple[Peer, ...] = (
    Peer(PLAIN, _paceline("plain", drafts=_NO_DRAFTS), main=True, **_OURS),
    Peer(DAY0, _paceline("day0", drafts={"suffix": "request"}, **_NO_TRAINING), main=True, **_OURS),
    Peer(SUFFIX, _paceline("suffix", drafts={"general": "none", "suffix": "request"}), **_OURS),
    Peer(AUTO, _paceline("auto"), main=True, **_OURS),
    Peer(LEARNT, _paceline("learnt"), main=True, learns=True, **_OURS),
    Peer(f"{PLAIN}, 1 thread", _paceline("single", 1, drafts=_NO_DRAFTS), most=1, **_OURS),
    Peer(ALONE, _alone, main=True, ours=True, over_http=False, variables=_ALONE),
    Peer(LLAMA_BF16, _llama(bf16_gguf), same_weights=True, main=True, **_LLAMA),
    Peer(f"{LLAMA_BF16}, 1 thread", _llama(bf16_gguf, threads=1), most=1, **_LLAMA),
    Peer("llama.cpp, the checkpoint's own file", _llama(own_gguf), main=True, **_LLAMA),
    Peer("llama.cpp, built here, bf16", _native_llama(bf16_gguf), same_weights=True),
    Peer("llama.cpp, built here, the checkpoint's own file", _native_llama(own_gguf)),
    Peer("llama.cpp, that file, n-grams", _llama(own_gguf, "--speculative", "NGRAM_MOD"), **_LLAMA),
    Peer("llama.cpp, bf16, n-grams", _llama(bf16_gguf, "--speculative", "NGRAM_MOD"), **_LLAMA),
    Peer(
        "llama.cpp, bf16, draft model",
        _llama(bf16_gguf, "--speculative", "DRAFT_SIMPLE", draft=True),
        **_LLAMA,
    ),
    Peer("OpenVINO, bf16", _openvino("fp16"), same_weights=True, main=True, **_OPENVINO),
    Peer("OpenVINO, int8", _openvino("int8"), main=True, **_OPENVINO),
    Peer("OpenVINO, int8, prompt lookup", _openvino("int8", "--lookup"), main=True, **_OPENVINO),
    Peer("OpenVINO, int8, draft model", _openvino("int8", draft=True), **_OPENVINO),
    Peer("vLLM, bf16", _vllm(), same_weights=True, main=True, **_VLLM),
    Peer(
        "vLLM, bf16, n-grams",
        _vllm(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2),
        **_VLLM,
    ),
    Peer("transformers, generate", _transformers("generate"), same_weights=True, most=1),
    Peer("transformers, prompt lookup", _transformers("lookup"), most=1),
    Peer("transformers, assisted", _transformers("draft"), most=1),
    Peer("transformers, continuous batching", _transformers("continuous"), same_weights=True),
)


def variables_of(peer: Peer, setup: Setup) -> dict[str, str]:
    """Environment of a peer's process: its own number of threads, no hub, no usage statistics."""
    own = environment() | dict(peer.variables)
    if peer.environment is VLLM:
        own |= {"OMP_NUM_THREADS": str(setup.threads)}
        own |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}"}
    if peer.environment is not None:
        own.pop("PYTHONPATH", None)
    return own
