"""Loading of a causal LM and its tokenizer from a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from paceline.actors.engine.attention import ATTENTION_NAME
from paceline.actors.engine.native.kernels import ACTIVATIONS
from paceline.actors.engine.native.library import load_library
from paceline.actors.processor import has_bfloat16
from paceline.actors.weights.checkpoint import read_architecture, read_causal_lm
from paceline.actors.weights.codes import attach_codes
from paceline.actors.weights.eagle import is_llama_like
from paceline.actors.weights.target_ends import TargetEnds, share_ends

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(device: str) -> torch.device:
    """Resolve a device; ``auto`` is the GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype; ``auto`` is bfloat16 if the device supports it natively, else float32.

    Raises:
        ValueError: the name is none of auto, bfloat16, float16, float32.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of auto, {', '.join(_DTYPES)}, not {dtype!r}")
        return _DTYPES[dtype]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = has_bfloat16()
    return torch.bfloat16 if native else torch.float32


def target_dtype(dtype: str, device: torch.device, path: str | Path) -> torch.dtype:
    """Resolve the dtype that a target is served in.

    ``auto`` is bfloat16 also where the CPU's kernels run the target: on every processor they widen
    such weights in registers, and read half as many bytes.

    Args:
        dtype: see resolve_dtype.
        device: that the target runs on.
        path: its folder.

    Raises:
        ValueError: see resolve_dtype.
        ModelError: the folder's config cannot be read.
    """
    if dtype == "auto" and device.type == "cpu" and load_library() is not None:
        config = read_architecture(path, "target")
        if is_llama_like(config) and config.hidden_act in ACTIVATIONS:
            return torch.bfloat16
    return resolve_dtype(dtype, device)


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    attention: str = ATTENTION_NAME,
    ends: TargetEnds | None = None,
) -> PreTrainedModel:
    """Load a transformers causal LM in eval mode, see :func:`read_causal_lm`.

    Args:
        path: model folder.
        dtype: of the weights.
        device: of the weights.
        attention: attention implementation; the engine's by default.
        ends: of the target, in place of the model's own.

    Raises:
        ModelError: a tensor is missing or of another shape.
        OSError: there is no model.
    """
    model = read_causal_lm(path, dtype=dtype, attn_implementation=attention)
    if ends is not None:
        share_ends(model, ends)
    if dtype is torch.bfloat16 and torch.device(device).type == "cpu":
        attach_codes(model, path)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a model folder."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True, use_fast=True)
