"""Model folders: which tensors a causal LM needs, and that its files hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SHOWN = 3
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelError(ValueError):
    """A model folder that cannot be served; the message is one line that says why."""


class _Header(torch.Tensor):
    """A tensor's shape without its numbers; it stays that wherever a loader moves it."""

    def to(self, *_: Any, **__: Any) -> _Header:
        return self


def weight_files(folder: str | Path, name: str) -> list[Path]:
    """The safetensors files of a model folder that transformers reads.

    Args:
        folder: of the model.
        name: what the model is called in an error.

    Raises:
        ModelError: a file is missing, or the index is broken.
    """
    folder = Path(folder)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise ModelError(f"{name}: {folder} has neither {_SINGLE} nor {_INDEX}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{name}: {index} cannot be read ({error})") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"{name}: {folder} lacks {_some(missing)}, which {_INDEX} names")
    return [folder / shard for shard in shards]


@contextmanager
def opened(file: Path, name: str) -> Iterator[Any]:
    """A safetensors file of a model.

    Args:
        file: its path.
        name: what the model is called in an error.

    Raises:
        ModelError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{name}: {file} cannot be read ({error})") from error


def read_architecture(folder: str | Path, name: str) -> PreTrainedConfig:
    """transformers' config of a model folder.

    Raises:
        ModelError: transformers refuses it.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a wrong value leads to
        reason = _first_line(error) if isinstance(error, OSError | ValueError) else repr(error)
        raise ModelError(f"{name}: {folder}/config.json: {reason}") from error
    return config


def check_tensors(folder: str | Path, name: str) -> None:
    """Refuse a causal LM whose files do not hold the tensors that its config asks for.

    transformers itself compares: it loads tensors of the files' names and shapes that take no
    memory, so renamed, merged, tied and ignored tensors are what they are at a real start. Only
    the headers of the files are read.

    Args:
        folder: of the model.
        name: what the model is called in an error.

    Raises:
        ModelError: names the tensors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, name):
        with opened(file, name) as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                shape = tensors.get_slice(key).get_shape()
                state[key] = torch.empty(shape, device="meta").as_subclass(_Header)
    config = read_architecture(folder, name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name}: {folder} is no causal LM ({config.model_type})")
    if getattr(config, "quantization_config", None) is not None:
        return  # which tensors it has is known where its kernels are
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    _loaded(kind, None, name, config=config, state_dict=state)


def read_causal_lm(folder: str | Path, **options: Any) -> Any:
    """A transformers causal LM, read from local safetensors only, whole or not at all.

    Tensors that the model does not have are ignored, as transformers does. ``tie_word_embeddings``
    of its config says afterwards whether the head is the embedding: a head of other values in the
    files unties it. One with ``head: shared`` in its config may lack embedding and head.

    Args:
        folder: of the model.
        options: of transformers' ``from_pretrained``.

    Raises:
        ModelError: a tensor is missing or of another shape.
        OSError: there is no model.
    """
    from transformers import AutoModelForCausalLM

    own = {"local_files_only": True, "use_safetensors": True}
    model = _loaded(AutoModelForCausalLM, folder, str(folder), **own, **options)
    head = model.get_output_embeddings()
    if head is not None:
        tied = head.weight is model.get_input_embeddings().weight
        model.config.tie_word_embeddings = tied
    return model


def has_shared_head(config: PreTrainedConfig) -> bool:
    """Whether a causal LM shares its target's embedding and head, by its config."""
    return getattr(config, "head", None) == "shared"


def ends_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """A causal LM's embedding and head, as modules that another model's can replace.

    Raises:
        ModelError: they are more than tables.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(table) is torch.nn.Embedding and type(head) is torch.nn.Linear
    if not plain or head.bias is not None:
        kind = model.config.model_type
        raise ModelError(f"draft: head: shared: models of type {kind} cannot share them")
    return table, head


def end_names(model: PreTrainedModel) -> set[str]:
    """Names of a causal LM's embedding and head; raises as :func:`ends_of`."""
    ends = {id(end.weight) for end in ends_of(model)}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in ends}


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of parameters that are another one under a further name."""
    seen: set[int] = set()
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.add(name)
        seen.add(id(parameter))
    return tied


@torch.no_grad()
def copy_state(
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    tied: Collection[str] = (),
) -> None:
    """Copy weights over a model's own tensors, in place.

    Args:
        own: the model's tensors by name.
        state: new values.
        tied: names that ``state`` may lack.

    Raises:
        ValueError: a name or shape differs; nothing has been copied then.
    """
    missing = [name for name in own if name not in state and name not in tied]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        raise ValueError(f"weights differ in names: missing {missing}, unknown {unknown}")
    wrong = [name for name, new in state.items() if new.shape != own[name].shape]
    if wrong:
        raise ValueError(f"weights differ in shape: {wrong}")
    for name, new in state.items():
        own[name].copy_(new)


def _loaded(kind: Any, folder: str | Path | None, name: str, **options: Any) -> Any:
    try:
        with _quiet():
            model, info = kind.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except RuntimeError as error:
        raise ModelError(
            f"{name}: the tensors of its files do not make up the model ({_first_line(error)})"
        ) from error
    if has_shared_head(model.config):
        info["missing_keys"] = set(info["missing_keys"]) - end_names(model)
    faults = _faults(info, model.state_dict())
    if faults:
        raise ModelError(f"{name}: {'; '.join(faults)}")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own report and progress bar: what matters of them is raised."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _faults(info: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What a load report says that a start must not pass over."""
    wrong = [
        f"{key} (the file has {list(found)}, the config asks for {list(wanted)})"
        for key, found, wanted in sorted(info["mismatched_keys"])
    ]
    layers = {_template(key) for key in own if _template(key) != key}
    beyond = [key for key in info["unexpected_keys"] if _template(key) in layers]
    found = [
        ("its files lack", info["missing_keys"]),
        ("wrong shape of", wrong),
        ("the config has fewer layers than the files, which hold", beyond),
        ("cannot be read:", info["error_msgs"]),
    ]
    return [f"{text} {_some(sorted(names))}" for text, names in found if names]


def _template(key: str) -> str:
    """A tensor's name without the numbers of its layer and expert."""
    return re.sub(r"\.\d+\.", ".*.", key)


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
