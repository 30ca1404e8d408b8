"""Optimizer state, and its checkpoints: a folder per topic, written in small files.

``<topic>/<version>-<digest>/`` holds the state at one publication: safetensors files of slices of
the flattened tensors, and an index of them. A trainer that shares its processor with requests
writes one file per permit. The folder gets its name when it is complete: a killed writer leaves the
checkpoint before.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from paceline.actors.weights.eagle import Draft

_MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of an AdamW.

    Attributes:
        tensors: ``<n>.master``, ``<n>.exp_avg``, ``<n>.exp_avg_sq`` and ``<n>.step`` of the n-th
            parameter, float32.
        steps: optimizer steps that led here.
        rate_share: of the learning rate, for the next steps.
    """

    tensors: dict[str, Tensor]
    steps: int
    rate_share: float = 1.0

    def copied(self) -> OptimizerState:
        """A copy on the CPU."""
        copies = {n: t.detach().to("cpu", copy=True) for n, t in self.tensors.items()}
        return OptimizerState(copies, self.steps, self.rate_share)


def parameter_groups(draft: Draft, trained: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: matrices, which are decayed, and all else; no empty ones.

    Norms, biases and embeddings are not decayed. A head that is tied to the embedding counts as
    the embedding, and so do the embedding's adapters.

    Args:
        draft: a causal LM.
        trained: its trained parameters, in the order that each group keeps.
        decay: of the matrices.
    """
    kept = {id(p) for n, p in draft.named_parameters() if p.dim() < 2 or n.endswith("bias")}
    tables = [m for m in draft.modules() if isinstance(m, nn.Embedding)]
    for table in (*tables, draft.get_input_embeddings()):
        kept |= {id(p) for p in table.parameters()}
    matrices = [p for p in trained if id(p) not in kept]
    others = [p for p in trained if id(p) in kept]
    groups = ((matrices, decay), (others, 0.0))
    return [{"params": own, "weight_decay": rate} for own, rate in groups if own]


def capture(optimizer: Optimizer, steps: int) -> OptimizerState:
    """An AdamW's state after its first step: the tensors themselves, which the next one changes."""
    tensors = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        kept = {_MASTER: parameter, **{m: optimizer.state[parameter][m] for m in _MOMENTS}}
        for name, tensor in kept.items():
            tensors[f"{number}.{name}"] = tensor.detach().float()
    return OptimizerState(tensors, steps)


def restore(optimizer: Optimizer, state: OptimizerState) -> None:
    """Load a state into an AdamW over the same parameters.

    Raises:
        ValueError: the tensors do not fit; the optimizer is unchanged.
    """
    parameters = _parameters(optimizer)
    shapes = {
        f"{number}.{name}": torch.Size([]) if name == "step" else parameter.shape
        for number, parameter in enumerate(parameters)
        for name in (_MASTER, *_MOMENTS)
    }
    if shapes != {name: tensor.shape for name, tensor in state.tensors.items()}:
        raise ValueError("the optimizer's state is of another draft")
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            parameter.copy_(state.tensors[f"{number}.{_MASTER}"])
            for moment in _MOMENTS:
                # AdamW wants its step count on the CPU
                place = "cpu" if moment == "step" else parameter.device
                value = state.tensors[f"{number}.{moment}"].to(place, copy=True)
                optimizer.state[parameter][moment] = value


def whole(state: OptimizerState, numels: Sequence[int], device: torch.device) -> OptimizerState:
    """Gather the ranks' parts of flat rows, less DeepSpeed's padding; a collective call.

    Args:
        state: of one rank under ZeRO stage 1 or 2.
        numels: elements of each group's weights.
        device: of the collective.
    """
    ranks = distributed.get_world_size()
    tensors = {}
    for name, tensor in state.tensors.items():
        if tensor.dim() and ranks > 1:
            mine = tensor.to(device)
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            distributed.all_gather(parts, mine)
            tensor = torch.cat(parts).cpu()
        number = int(name.partition(".")[0])
        tensors[name] = tensor[: numels[number]] if tensor.dim() else tensor
    return OptimizerState(tensors, state.steps)


def part(state: OptimizerState, optimizer: Optimizer, numels: Sequence[int]) -> OptimizerState:
    """This rank's part of a state of :func:`whole`, padded as this optimizer's rows are.

    Args:
        state: as :func:`whole` returned it.
        optimizer: of this rank, under ZeRO stage 1 or 2.
        numels: elements of each group's weights.

    Raises:
        ValueError: if the rows are others or a row has another length.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    rows = {str(number): row.numel() for number, row in enumerate(_parameters(optimizer))}
    sizes = dict(zip(rows, numels, strict=True))
    tensors = dict(state.tensors)
    for name, tensor in tensors.items():
        number = name.partition(".")[0]
        if tensor.dim() and tensor.shape != (sizes.get(number),):
            raise ValueError("the optimizer's state is of another draft")
        if tensor.dim():
            length = rows[number]
            padded = torch.nn.functional.pad(tensor, (0, ranks * length - len(tensor)))
            tensors[name] = padded[rank * length : (rank + 1) * length]
    return OptimizerState(tensors, state.steps)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


logger = logging.getLogger(__name__)

_INDEX = "index.json"
_PARTIAL = ".partial-"
_FILE_BYTES = 3 << 20  # some 10 ms of writing


def save_checkpoint(
    folder: Path,
    state: OptimizerState,
    version: int,
    digest: str,
    before_file: Callable[[], object] = lambda: None,
    *,
    beside: int | None = None,
) -> None:
    """Write the state at a publication.

    Args:
        folder: of the topic; created if missing.
        state: at the publication; its tensors must not change until this returns.
        version: weight_version that was published.
        digest: of the published weights.
        before_file: called before each file; may wait for a permit, or raise: the checkpoints there
            then stay.
        beside: another version to keep, the stable one of a trial; all others are removed.

    Raises:
        OSError: it cannot be written.
        SafetensorError: likewise.
    """
    partial = folder / f"{_PARTIAL}{uuid.uuid4().hex}"
    whole = folder / _name(version, digest)
    partial.mkdir(parents=True)
    files = 0
    for files, pieces in enumerate(_files(state.tensors), start=1):
        before_file()
        file = partial / f"{files:05d}.safetensors"
        save_file({n: p.to("cpu", copy=_is_part(p)) for n, p in pieces.items()}, file)
        _flush(file)
    before_file()
    index = {
        "version": version,
        "digest": digest,
        "steps": state.steps,
        "rate_share": state.rate_share,
        "files": files,
        "tensors": {name: list(tensor.shape) for name, tensor in state.tensors.items()},
    }
    (partial / _INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
    _flush(partial / _INDEX)
    shutil.rmtree(whole, ignore_errors=True)
    partial.rename(whole)
    _clear(folder, {version, beside}, whole, before_file)


def _clear(
    folder: Path, kept: set[int | None], whole: Path, before_folder: Callable[[], object]
) -> None:
    """Remove checkpoints of other versions, of other weights of this one, and partial ones."""
    for other in folder.iterdir():
        number, _, _ = other.name.partition("-")
        stays = number.isdecimal() and int(number) in kept
        if other != whole and not (stays and not whole.name.startswith(f"{number}-")):
            before_folder()
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(folder: Path, version: int, digest: str) -> OptimizerState | None:
    """The checkpoint of this version of these weights; None without one.

    One of another version, or one that cannot be read, is logged.
    """
    whole = folder / _name(version, digest)
    if not whole.is_dir():
        if folder.is_dir():
            logger.info("%s is not of version %d: the optimizer starts fresh", folder.name, version)
        return None
    try:
        index = json.loads((whole / _INDEX).read_text(encoding="utf-8"))
        if (index["version"], index["digest"]) != (version, digest):
            raise ValueError("it holds another version")
        return OptimizerState(
            _joined(whole, index), int(index["steps"]), float(index.get("rate_share", 1.0))
        )
    except Exception as error:
        logger.warning("%s cannot be read (%s): the optimizer starts fresh", folder.name, error)
        return None


def _joined(whole: Path, index: Mapping[str, Any]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in index["tensors"]}
    for number in range(1, index["files"] + 1):
        pieces = load_file(whole / f"{number:05d}.safetensors")
        for name in sorted(pieces):
            parts[name.rpartition("@")[0]].append(pieces[name])
    shapes = index["tensors"].items()
    return {name: torch.cat(parts[name]).reshape(shape) for name, shape in shapes}


def _files(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The flattened tensors in slices ``<name>@<number>``, as many as a file takes at a time."""
    pieces: dict[str, Tensor] = {}
    room = _FILE_BYTES
    for name, tensor in tensors.items():
        left, number = tensor.reshape(-1), 0
        while len(left):
            fits = room // tensor.itemsize
            if fits == 0:
                yield pieces
                pieces, room = {}, _FILE_BYTES
                continue
            pieces[f"{name}@{number:08d}"] = left[:fits]
            room -= min(fits, len(left)) * tensor.itemsize
            left, number = left[fits:], number + 1
    if pieces:
        yield pieces


def _is_part(piece: Tensor) -> bool:
    """Whether a slice shares its storage, which safetensors does not save."""
    return piece.untyped_storage().nbytes() != piece.nbytes


def _name(version: int, digest: str) -> str:
    return f"{version}-{digest[:16]}"


def _flush(path: Path) -> None:
    with path.open("rb") as written:
        os.fsync(written.fileno())
