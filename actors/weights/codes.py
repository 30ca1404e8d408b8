"""Codes of a quantized checkpoint, kept beside the bfloat16 weights that they decode to.

A GGUF file of 4 or 8 bits says a weight as ``scale * code + min``, with one scale and min for 32
columns of an output. Transformers gives these weights in bfloat16. The codes are a third to a half
of those bytes; where a product is as fast as memory gives the weights, reading them instead makes
it faster, and the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP = 32
CODES_FILE = "codes.safetensors"
_PARTS = ("codes", "scales", "mins")
# Of GGUF's names of a decoder's weights.
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of a weight ``[out, in]``.

    Attributes:
        bits: 4 or 8, of a code.
        codes: uint8; of 4 bits ``[out, in / 2]``, the even column in the low half, of 8 bits
            ``[out, in]``, the code plus 128.
        scales: float16 ``[out, in / 32]``.
        mins: like ``scales``, of 4 bits; else None.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None

    def rows(self, index: Any) -> Codes:
        """The codes of some outputs, by anything that indexes a tensor."""
        mins = None if self.mins is None else self.mins[index]
        return Codes(self.bits, self.codes[index], self.scales[index], mins)


def rounded(weight: Tensor) -> Codes:
    """Codes of 8 bits nearest to a weight ``[out, in]``, ``in`` a multiple of the group."""
    groups = weight.to(torch.float32, copy=True).view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 127.0).half()
    # What is too small for a float16 scale becomes zero; what is not finite stays so by its scale.
    steps = groups.div_(scales.float().clamp_(min=1e-8)[..., None]).nan_to_num_().round_()
    codes = steps.clamp_(-127.0, 127.0).add_(128.0).to(torch.uint8)
    return Codes(8, codes.flatten(1), scales)


def concatenated(parts: Sequence[Codes | None]) -> Codes | None:
    """Codes of weights one below the other; None if one has none, or they differ in bits."""
    given = [part for part in parts if part is not None]
    if not given or len(given) < len(parts) or len({part.bits for part in given}) > 1:
        return None
    mins = [part.mins for part in given if part.mins is not None]
    return Codes(
        given[0].bits,
        torch.cat([part.codes for part in given]),
        torch.cat([part.scales for part in given]),
        torch.cat(mins) if mins else None,
    )


def codes_of(weight: Tensor) -> Codes | None:
    """The codes that :func:`give_codes` has given to a weight."""
    return getattr(weight, "paceline_codes", None)


def give_codes(weight: Tensor, codes: Codes) -> None:
    """Give a weight its codes, for whoever packs it."""
    weight.paceline_codes = codes  # type: ignore[attr-defined]


def read_codes(folder: str | Path) -> dict[str, Codes]:
    """Read the codes of a model folder by the names of their weights; none if it has no file."""
    file = Path(folder) / CODES_FILE
    if not file.is_file():
        return {}
    parts: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118
            name, _, part = key.rpartition(".")
            parts.setdefault(name, {})[part] = tensors.get_tensor(key)
    return {name: Codes(4 if "mins" in own else 8, **own) for name, own in parts.items()}


def attach_codes(model: torch.nn.Module, folder: str | Path) -> None:
    """Give the parameters of a model their codes."""
    for name, codes in read_codes(folder).items():
        give_codes(model.get_parameter(name), codes)


def write_codes(file: Path, config: Any, folder: Path) -> None:
    """Write the codes of a GGUF file that has become a model folder.

    Weights of other formats have none: 4 bits with scale (Q4_0) and min (Q4_1), and 8 bits (Q8_0)
    are read.

    Args:
        file: the GGUF file.
        config: transformers' config of the model.
        folder: of the model.
    """
    from gguf import GGUFReader

    found: dict[str, Tensor] = {}
    for tensor in GGUFReader(file).tensors:
        name = _weight_name(tensor.name)
        codes = None if name is None else _decoded(tensor.tensor_type.name, tensor.data)
        if codes is None:
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        own = heads.get(tensor.name.split(".")[-2])
        if config.model_type in ("llama", "mistral") and own is not None:
            codes = codes.rows(_paired_halves(len(codes.codes), own))
        found |= {
            f"{name}.{part}": value.contiguous()
            for part in _PARTS
            if (value := getattr(codes, part)) is not None
        }
    if found:
        save_file(found, folder / CODES_FILE)


def _weight_name(name: str) -> str | None:
    parts = name.split(".")
    if parts[-1] != "weight":
        return None
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _MODULES:
        return f"model.layers.{parts[1]}.{_MODULES[parts[2]]}.weight"
    return f"{_ENDS[parts[0]]}.weight" if len(parts) == 2 and parts[0] in _ENDS else None


def _paired_halves(rows: int, heads: int) -> Tensor:
    """Rows of a head in transformers' order: GGUF has the two halves of a rotation side by side."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _decoded(kind: str, data: Any) -> Codes | None:
    """Split GGUF's blocks of 32 weights, uint8 ``[out, bytes]``."""
    sizes = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}
    if kind not in sizes:
        return None
    head, body = sizes[kind]
    blocks = torch.from_numpy(data.copy()).view(len(data), -1, head + body)
    ends = blocks[..., :head].contiguous().view(torch.float16)
    scales, values = ends[..., 0], blocks[..., head:]
    if kind == "Q8_0":
        return Codes(8, values.flatten(1) ^ 128, scales)
    # The low halves are the first 16 columns.
    columns = torch.cat([values & 15, values >> 4], dim=-1)
    codes = columns[..., ::2] | columns[..., 1::2] << 4
    return Codes(4, codes.flatten(1), scales, ends[..., 1] if head == 4 else scales * -8)
