"""EAGLE drafts: a small trunk between the target's own embedding and head.

The draft reads the embedding of a token and the target's hidden state of the position before (Li et
al., EAGLE, arXiv 2401.15077); for further tokens its own hidden state takes the target's place, for
which it is trained (EAGLE-3, arXiv 2503.01840). Embedding and head are the target's, frozen: a
draft is its trunk, and proposes from a list of frequent tokens. The trunk starts as the target's
first layers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.actors.weights.checkpoint import (
    ModelError,
    opened,
    read_architecture,
    weight_files,
)
from paceline.actors.weights.target_ends import (
    EMBEDDING,
    TargetEnds,
    read_target_ends,
    read_tensors,
)

if TYPE_CHECKING:  # transformers' models take seconds to import, which a registry need not
    from transformers import PreTrainedConfig, PreTrainedModel

MODEL_TYPE = "eagle"
VOCABULARY = "vocabulary"
BASIS = "basis"
_NORM = "model.norm.weight"
_LAYERS = "model.layers."
_MARKED_ROWS = 64
_FACTS = {"target_mark", "draft_vocab_size", "trunk"}
DRAFT_VOCABULARY = 16384
_MAX_RANK = 128  # of a basis: of 576 directions these tell 99 of 100 tokens, of other prompts
SUPPORT = 1  # tokens per position that a draft samples from
_LEAST_COVERAGE_GAIN = 0.005


def is_eagle(folder: str | Path) -> bool:
    """Whether a folder holds an EAGLE draft, by its config."""
    try:
        facts = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and facts.get("model_type") == MODEL_TYPE


def target_mark(target: str | Path) -> str:
    """Mark of a target, by its config's sizes, final norm and some rows of its embedding.

    Drafts are made for one target; reading all of a large one would take minutes.
    """
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.blake2b(digest_size=8)
    sizes = [config.get(k) for k in ("model_type", "hidden_size", "num_hidden_layers")]
    digest.update(json.dumps(sizes).encode())
    for file in weight_files(target, "target"):
        with opened(file, "target") as tensors:
            for name in sorted({EMBEDDING, _NORM} & set(tensors.keys())):
                rows = tensors.get_slice(name)[:_MARKED_ROWS]
                digest.update(name.encode() + rows.float().numpy().tobytes())
    return digest.hexdigest()


_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


class EagleDraft(nn.Module):
    """The trainable part of a draft, with the target's ends beside it.

    Attributes:
        config: transformers' config of the trunk, with the target's ``vocab_size``.
        mark: of the target, see :func:`target_mark`.
        basis: ``[R, H]``, orthonormal directions that hold most of the head's inputs, by which a
            product of R instead of H columns tells the few tokens that may be the most probable. It
            is a part of the weights, and of no use to others; zeros where it is not known.
        ends: the target's embedding and head; no parameters of the draft.
    """

    basis: Tensor

    def __init__(self, config: PreTrainedConfig, mark: str, draft_vocabulary: int) -> None:
        """Make a draft with random weights.

        Args:
            config: of the trunk; ``vocab_size`` is the target's.
            mark: of the target.
            draft_vocabulary: D, tokens that the draft proposes from.
        """
        from transformers import AutoModel

        super().__init__()
        self.config, self.mark = config, mark
        hidden = int(config.hidden_size)
        own = copy.deepcopy(config)
        own.vocab_size, own.pad_token_id = 1, None
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)
        self.trunk = AutoModel.from_config(own, attn_implementation="eager")
        self.trunk.embed_tokens = None
        self.register_buffer(VOCABULARY, torch.arange(draft_vocabulary, dtype=torch.int32))
        self.register_buffer(BASIS, torch.zeros(min(_MAX_RANK, hidden // 4), hidden))
        # In a tuple: neither parameters nor buffers.
        self._ends: tuple[TargetEnds, ...] = ()
        self._own_head: tuple[Tensor, Tensor] | None = None  # and the vocabulary that it is of

    @property
    def ends(self) -> TargetEnds:
        """See class."""
        return self._ends[0]

    @ends.setter
    def ends(self, ends: TargetEnds) -> None:
        self._ends, self._own_head = (ends,), None

    @property
    def has_basis(self) -> bool:
        """Whether the basis is known."""
        return bool(self.basis.any())

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.fuse.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fuse.weight.dtype

    @property
    def head(self) -> Tensor:
        """``[D, H]``, the rows of the target's head for the draft's vocabulary."""
        ids = self.get_buffer(VOCABULARY)
        if self._own_head is None or not torch.equal(self._own_head[0], ids):
            rows = ids.long().to(self.ends.head.device)
            self._own_head = ids.clone(), self.ends.head[rows].to(self.device, self.dtype)
        return self._own_head[1]

    def cast(self, device: torch.device, dtype: torch.dtype) -> EagleDraft:
        """Move to a device and dtype, but for the rotary frequencies: they stay float32."""
        rotary = copy.deepcopy(self.trunk.rotary_emb)
        self.to(device=device, dtype=dtype)
        self.trunk.rotary_emb = rotary.to(device)
        return self

    def twin(self) -> EagleDraft:
        """Another draft of this shape, for the same target, on the same device."""
        size = len(self.get_buffer(VOCABULARY))
        draft = EagleDraft(self.config, self.mark, size).cast(self.device, self.dtype)
        draft.ends, draft.basis = self.ends, torch.zeros_like(self.basis)
        return draft

    def get_output_embeddings(self) -> None:
        """The head is the target's."""
        return

    def get_input_embeddings(self) -> nn.Module:
        """A module without parameters: the embedding is the target's."""
        return nn.Identity()

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The trunk's input ``[B, T, H]``.

        Args:
            token_ids: int64 ``[B, T]``.
            hidden: ``[B, T, H]``, of the positions before.
        """
        embedded = nn.functional.embedding(token_ids, self.ends.embedding)
        joined = torch.cat([embedded.to(self.dtype), hidden.to(self.dtype)], dim=-1)
        fused: Tensor = self.fuse(joined)
        return fused


def weights_for(draft: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights for a draft; older ones have no basis that fits, and get one of zeros.

    Raises:
        ValueError: their vocabulary has tokens that the target lacks. To be known before they are
            copied: drafts that share a decoder make their heads together.
    """
    if not isinstance(draft, EagleDraft):
        return state
    ids = state.get(VOCABULARY, torch.empty(0))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < draft.config.vocab_size:
        raise ValueError("the draft's vocabulary has tokens that the target lacks")
    known = state.get(BASIS)
    if known is not None and known.shape == draft.basis.shape:
        return state
    return {**state, BASIS: torch.zeros_like(draft.basis)}


Draft: TypeAlias = "PreTrainedModel | EagleDraft"  # in annotations alone
"""A draft with weights of its own: a causal LM, or one made from the target."""


def is_llama_like(config: PreTrainedConfig) -> bool:
    """Whether a transformers config is of a Llama-like model with a fixed rotary table.

    Such models run fused, and drafts are made from them.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return config.model_type in _FAMILIES and rope.get("rope_type", "default") in _FIXED_ROPE


def new_draft(target: str | Path, layers: int = 1, vocabulary: Tensor | None = None) -> EagleDraft:
    """Make a draft from a target and nothing else: its first layers and its final norm.

    Args:
        target: folder of a model of a fused architecture.
        layers: of the trunk.
        vocabulary: int32 ``[D]``, the draft's tokens; None is the first ones, which byte-pair
            tokenizers number by frequency, and the last, which are often special.

    Raises:
        ModelError: another architecture, or tensors are missing.
    """
    config = read_architecture(target, "target")
    if not is_llama_like(config):
        raise ModelError(f"target: no draft can be made from models of type {config.model_type}")
    size = int(config.vocab_size)
    if vocabulary is None:
        vocabulary = first_tokens(size, DRAFT_VOCABULARY)
    mark = target_mark(target)
    trunk = copy.deepcopy(config)
    trunk.num_hidden_layers, trunk.sliding_window, trunk.use_sliding_window = layers, None, False
    if getattr(trunk, "layer_types", None) is not None:
        trunk.layer_types = ["full_attention"] * layers
    prefixes = (_NORM, *(f"{_LAYERS}{layer}." for layer in range(layers)))
    state = read_tensors(target, lambda name: name.startswith(prefixes))
    draft = EagleDraft(trunk, mark, len(vocabulary))
    own = {name.replace("model.", "trunk.", 1): tensor for name, tensor in state.items()}
    hidden = int(config.hidden_size)
    # The target's hidden state has no part at first: the draft is the target's first layers.
    own["fuse.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    own[VOCABULARY], own[BASIS] = vocabulary, draft.basis
    missing = [name for name in draft.state_dict() if name not in own]
    if missing:
        raise ModelError(f"target: {target} lacks {missing[0].replace('trunk.', 'model.', 1)}")
    draft.load_state_dict(own)
    return draft


def first_tokens(size: int, count: int) -> Tensor:
    """Return the draft vocabulary of a tokenizer about which nothing is known, int32 ``[D]``.

    Args:
        size: V, of the target's vocabulary.
        count: D at most.
    """
    if size <= count:
        return torch.arange(size, dtype=torch.int32)
    last = count // 16
    ids = torch.cat([torch.arange(count - last), torch.arange(size - last, size)])
    return ids.to(torch.int32)


def choose_vocabulary(
    counts: Mapping[int, int], always: Collection[int], size: int, count: int
) -> Tensor:
    """Choose a draft's tokens, int32 ``[D]``, ascending.

    Args:
        counts: how often each token was seen.
        always: tokens to take in any case.
        size: V, of the target's vocabulary.
        count: D; what is left over goes to the first tokens, see :func:`first_tokens`.
    """
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    order = dict.fromkeys((*sorted(always), *by_count, *range(size)))
    chosen = [token for token in order if 0 <= token < size][:count]
    return torch.tensor(sorted(chosen), dtype=torch.int32)


def grown_vocabulary(
    ids: Tensor, counts: Mapping[int, int], size: int, always: Collection[int]
) -> Tensor:
    """Replace tokens that a topic never uses by ones that it uses and the draft lacks.

    The list stays as it is until that covers half a percent more of the tokens: experts of one
    vocabulary share the rows of the head.

    Args:
        ids: int32 ``[D]``, the present list.
        counts: how often each token was seen in the topic's records.
        size: V.
        always: tokens to keep: single characters and special ones.

    Returns:
        int32 ``[D]``, ascending; ``ids`` itself if nothing changes.
    """
    known, kept = set(ids.tolist()), set(always)
    missing = sorted((t for t in counts if t not in known and t < size), key=lambda t: -counts[t])
    unused = sorted((t for t in known - kept if not counts.get(t)), reverse=True)
    pairs = list(zip(missing, unused, strict=False))
    gain = sum(counts[token] for token, _ in pairs)
    if gain < _LEAST_COVERAGE_GAIN * sum(counts.values()) or not pairs:
        return ids
    known -= {token for _, token in pairs}
    return torch.tensor(sorted(known | {token for token, _ in pairs}), dtype=torch.int32)


def save_draft(draft: EagleDraft, folder: str | Path) -> None:
    """Write config and bfloat16 safetensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trunk = draft.config.to_dict()
    facts = {
        "model_type": MODEL_TYPE,
        "target_mark": draft.mark,
        "vocab_size": int(draft.config.vocab_size),
        "max_position_embeddings": int(draft.config.max_position_embeddings),
        "draft_vocab_size": len(draft.get_buffer(VOCABULARY)),
        "trunk": {key: value for key, value in trunk.items() if key != "_name_or_path"},
    }
    state = {
        name: tensor.detach().to("cpu", published_dtype(tensor)).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # Last: a draft is there if its config is.
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    # safetensors' files are their owner's alone, whatever the umask.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def published_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a draft's tensor is stored and sent: bfloat16, integers as they are."""
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype


def _facts(folder: Path) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if facts.get("model_type") != MODEL_TYPE or not facts.keys() >= _FACTS:
        raise ModelError(f"{folder} holds no EAGLE draft")
    return facts


def trunk_config(folder: str | Path) -> PreTrainedConfig:
    """transformers' config of a draft's trunk.

    Raises:
        ModelError: the folder holds something else.
        OSError: there is no such folder.
    """
    from transformers import AutoConfig

    trunk = dict(_facts(Path(folder))["trunk"])
    return AutoConfig.for_model(trunk.pop("model_type"), **trunk)


def draft_vocabulary_size(folder: str | Path) -> int:
    """D, tokens that a folder's draft proposes from; raises as :func:`trunk_config`."""
    return int(_facts(Path(folder))["draft_vocab_size"])


def read_draft(folder: str | Path) -> EagleDraft:
    """Read what :func:`save_draft` wrote, in float32 and without the target's ends.

    Raises:
        ModelError: the folder holds something else, or tensors are missing.
        OSError: there is no such folder.
    """
    folder = Path(folder)
    facts = _facts(folder)
    size = draft_vocabulary_size(folder)
    draft = EagleDraft(trunk_config(folder), facts["target_mark"], size)
    try:
        state = load_file(folder / "model.safetensors")
        if len(state.get(BASIS, ())):
            draft.basis = torch.zeros(state[BASIS].shape)
        draft.load_state_dict(weights_for(draft, state))
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise ModelError(f"{folder}: {str(error).splitlines()[0]}") from error
    return draft


def is_made_for(folder: str | Path, target: str | Path) -> bool:
    """Whether a folder holds a draft of this target."""
    return is_eagle(folder) and _facts(Path(folder)).get("target_mark") == target_mark(target)


def check_made_for(folder: str | Path, target: str | Path) -> None:
    """Refuse a draft that was made for another target.

    Raises:
        ModelError: it was.
        OSError: a file cannot be read.
    """
    if not is_made_for(folder, target):
        raise ModelError(f"draft: {folder} was made for another target than {target}")


def load_draft(
    folder: str | Path,
    target: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    ends: TargetEnds | None = None,
) -> EagleDraft:
    """Read a draft with its target's ends, ready to be trained or served.

    Args:
        folder: of the draft.
        target: folder of the target.
        dtype: of the weights.
        device: of the weights.
        ends: the target's; None reads them, in that dtype.

    Raises:
        ModelError: it is broken, or made for another target.
        OSError: there is no such folder.
    """
    check_made_for(folder, target)
    draft = read_draft(folder).cast(device, dtype)
    draft.ends = ends or read_target_ends(str(target), device, dtype)
    return draft
