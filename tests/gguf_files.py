"""A tiny Llama as a GGUF file, and as a package that pip can fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_models import tiny_llama, tiny_tokenizer
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, seed: int = 1, layers: int = 2, kind: str = "F32") -> Any:
    """Write the tiny Llama of a seed, its matrices in a format of GGUF; returns the model."""
    model = tiny_llama(seed, layers=layers)
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [names.get(i, f"<unused{i}>") for i in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in tokenizer.all_special_ids else 1 for i in range(len(tokens))])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in words["merges"]]
    writer.add_token_merges(merges or ["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in model.state_dict().items():
        array, raw = _array(name, tensor, config), gguf.GGMLQuantizationType[kind]
        if kind != "F32" and array.ndim == 2:
            writer.add_tensor(_gguf_name(name), gguf.quantize(array, raw), raw_dtype=raw)
        else:
            writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.weight"


def _array(name: str, tensor: Tensor, config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Llama's queries and keys are permuted in GGUF: its rotary embedding pairs neighbours."""
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            rows, columns = tensor.shape
            halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
            tensor = halves.transpose(1, 2).reshape(rows, columns)
    return tensor.to(torch.float32).contiguous().numpy()


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> str:
    """Write a wheel that holds files; returns its sha256."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={_urlsafe(content)},{len(content)}\n" for path, content in files.items()
    )
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(path, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
