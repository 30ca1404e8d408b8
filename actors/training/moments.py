"""An optimizer's state on disk: a folder per topic, in files small enough to be written in turns.

``<topic>/<version>-<digest>/`` holds the state at one publication: safetensors files of slices of
the flattened tensors, and an index of what they are. A trainer that shares its processor with
requests writes one file at a time, and asks for leave in between. The folder gets its name when
it is whole: a killed writer leaves what was there before.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.actors.training.optimizer_state import OptimizerState

logger = logging.getLogger(__name__)

_INDEX = "index.json"
_PARTIAL = ".partial-"
_FILE_BYTES = 3 << 20  # some 10 ms of writing


def save(
    folder: Path,
    state: OptimizerState,
    version: int,
    digest: str,
    before_file: Callable[[], None] = lambda: None,
    *,
    beside: int | None = None,
) -> None:
    """Keep the state at a publication.

    Args:
        folder: the topic's; made where it is missing.
        state: at the moment of publication; its tensors must not change until this returns.
        version: weight_version that was published.
        digest: of the published weights.
        before_file: called before each file; may wait for leave, or raise: what was there stays.
        beside: another version whose state stays, the stable one of a trial; all others go.

    Raises:
        OSError: where it cannot be written.
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
    folder: Path, kept: set[int | None], whole: Path, before_folder: Callable[[], None]
) -> None:
    """Remove states of other versions, other weights of this one, and what was never finished."""
    for other in folder.iterdir():
        number, _, _ = other.name.partition("-")
        stays = number.isdecimal() and int(number) in kept
        if other != whole and not (stays and not whole.name.startswith(f"{number}-")):
            before_folder()
            shutil.rmtree(other, ignore_errors=True)


def load(folder: Path, version: int, digest: str) -> OptimizerState | None:
    """What :func:`save` wrote for this version of these weights; None where that is not there.

    A state of another version, or one that cannot be read, is named in the log.
    """
    whole = folder / _name(version, digest)
    if not whole.is_dir():
        if folder.is_dir():
            logger.info("%s is not of version %d: moments start anew", folder.name, version)
        return None
    try:
        index = json.loads((whole / _INDEX).read_text(encoding="utf-8"))
        if (index["version"], index["digest"]) != (version, digest):
            raise ValueError("it holds another version")
        return OptimizerState(
            _joined(whole, index), int(index["steps"]), float(index.get("rate_share", 1.0))
        )
    except Exception as error:
        logger.warning("%s cannot be read (%s): moments start anew", folder.name, error)
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
    """The flattened tensors in slices ``<name>@<number>``, as many at once as a file takes."""
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
    """Whether a file of this slice would take its whole tensor to be shared with others."""
    return piece.untyped_storage().nbytes() != piece.nbytes


def _name(version: int, digest: str) -> str:
    return f"{version}-{digest[:16]}"


def _flush(path: Path) -> None:
    with path.open("rb") as written:
        os.fsync(written.fileno())
