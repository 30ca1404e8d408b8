"""A target's embedding and head, which its drafts may share: frozen, never stored, sent or trained.

EAGLE drafts always do. A causal LM of the target's hidden size and vocabulary does if its
``config.json`` says ``"head": "shared"``; its own files may then lack the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.actors.weights.checkpoint import (
    ModelError,
    ends_of,
    has_shared_head,
    opened,
    read_architecture,
    weight_files,
)
from paceline.actors.weights.codes import give_codes, read_codes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SIZES = ("hidden_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The parts of a target that its drafts share: V tokens, hidden states of size H.

    Attributes:
        embedding: ``[V, H]``.
        head: ``[V, H]``; the embedding itself if the target ties them.
    """

    embedding: Tensor
    head: Tensor

    def __deepcopy__(self, _: dict[int, object]) -> TargetEnds:
        """Copies of a draft share them."""
        return self


def read_tensors(folder: str | Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors of a target's files by name.

    Raises:
        ModelError: a file is missing.
    """
    found: dict[str, Tensor] = {}
    for file in weight_files(folder, "target"):
        with opened(file, "target") as tensors:
            found |= {n: tensors.get_tensor(n) for n in tensors.keys() if wanted(n)}  # noqa: SIM118
    return found


@lru_cache(maxsize=4)  # the drafts of a process share them
def read_target_ends(
    target: str, device: torch.device, dtype: torch.dtype | None = None
) -> TargetEnds:
    """Read a target's embedding and head from its files, by default in their dtype.

    Raises:
        ModelError: the files lack the embedding.
    """
    found = read_tensors(target, lambda name: name in (EMBEDDING, HEAD))
    if EMBEDDING not in found:
        raise ModelError(f"target: {target} has no {EMBEDDING}, which its drafts share")
    own = {name: tensor.to(device, dtype or tensor.dtype) for name, tensor in found.items()}
    for name, codes in read_codes(target).items():
        if name in own:
            give_codes(own[name], codes)
    return TargetEnds(own[EMBEDDING], own.get(HEAD, own[EMBEDDING]))


class SharedEmbedding(nn.Module):
    """The target's embedding in place of a draft's; no parameter of it."""

    def __init__(self, ends: TargetEnds) -> None:
        super().__init__()
        self.ends = ends
        self.num_embeddings = len(ends.embedding)

    @property
    def weight(self) -> Tensor:
        """``[V, H]``."""
        return self.ends.embedding

    def forward(self, token_ids: Tensor) -> Tensor:
        """Int64 ``[...]`` to ``[..., H]``."""
        return functional.embedding(token_ids, self.weight)


class SharedHead(nn.Module):
    """The target's head in place of a draft's; no parameter of it."""

    def __init__(self, ends: TargetEnds) -> None:
        super().__init__()
        self.ends = ends

    @property
    def weight(self) -> Tensor:
        """``[V, H]``."""
        return self.ends.head

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to logits ``[..., V]``."""
        return functional.linear(hidden, self.weight)


def shares_ends(folder: str | Path) -> bool:
    """Whether the causal LM in a folder shares its target's ends."""
    return has_shared_head(read_architecture(folder, "draft"))


def share_ends(model: PreTrainedModel, ends: TargetEnds) -> PreTrainedModel:
    """Put the target's ends in place of a causal LM's own, and return it.

    Raises:
        ModelError: sizes differ, or the ends are no plain tables.
    """
    table, head = ends_of(model)
    for own, shared in ((table, ends.embedding), (head, ends.head)):
        if own.weight.shape != shared.shape:
            sizes = f"{list(own.weight.shape)}, the target's {list(shared.shape)}"
            raise ModelError(f"draft: head: shared: its embedding or head is {sizes}")
    model.set_input_embeddings(SharedEmbedding(ends))
    model.set_output_embeddings(SharedHead(ends))
    model.config.tie_word_embeddings = ends.head is ends.embedding
    return model


def check_shared_ends(folder: str | Path, target: str | Path, name: str) -> None:
    """Refuse a draft whose sizes are not the target's, or a target whose ends cannot be read.

    Args:
        folder: of a draft with ``head: shared``.
        target: folder of the target.
        name: what the draft is called in an error.

    Raises:
        ModelError: names the key and both sizes.
    """
    draft_config, target_config = (
        json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        for path in (folder, target)
    )
    for key in _SIZES:
        own, wanted = draft_config.get(key), target_config.get(key)
        if own != wanted:
            raise ModelError(f"{name}: head: shared: its {key} is {own}, the target's {wanted}")
    files = weight_files(target, "target")
    if not any(_holds(file, EMBEDDING) for file in files):
        kind = target_config.get("model_type")
        raise ModelError(f"{name}: head: shared: targets of type {kind} share no embedding")


def _holds(file: Path, name: str) -> bool:
    with opened(file, "target") as tensors:
        return name in tensors.keys()  # noqa: SIM118 - not a mapping
