"""An optimizer's state on disk: a folder per topic, in files small enough to be written in turns.

``<topic>/<version>-<digest>/`` holds the state at one publication: safetensors files and the
index of them that Hugging Face's sharded checkpoints have. A trainer that shares its processor
with requests writes one file at a time, and asks for leave in between. The folder gets its name
when it is whole: a killed writer leaves what was there before.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file

from paceline.actors.training.optimizer_state import OptimizerState

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_PARTIAL = ".partial"
# Bytes of a file, but for a single tensor that is larger: some 10 ms on a disk and in a checksum.
_FILE_BYTES = 3 << 20


def save(
    folder: Path,
    state: OptimizerState,
    version: int,
    digest: str,
    before_file: Callable[[], None] = lambda: None,
) -> None:
    """Keep the state at a publication, in place of the one before.

    Args:
        folder: the topic's; made where it is missing.
        state: at the moment of publication; its tensors must not change until this returns.
        version: weight_version that was published.
        digest: of the published weights.
        before_file: called before each file; may wait for leave, or raise: what was there stays.

    Raises:
        OSError: where it cannot be written.
    """
    partial, whole = folder / _PARTIAL, folder / _name(version, digest)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    plan = split_torch_state_dict_into_shards(state.tensors, max_shard_size=_FILE_BYTES)
    for name, tensors in plan.filename_to_tensors.items():
        before_file()
        save_file({n: state.tensors[n].contiguous() for n in tensors}, partial / name)
        _flush(partial / name)
    before_file()
    facts = {"version": version, "digest": digest, "steps": state.steps}
    # the library writes none where one file is enough
    files = {tensor: file for file, each in plan.filename_to_tensors.items() for tensor in each}
    index = {"metadata": facts, "weight_map": files}
    (partial / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    _flush(partial / _INDEX)
    shutil.rmtree(whole, ignore_errors=True)
    partial.rename(whole)
    for other in folder.iterdir():
        if other != whole:
            before_file()
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
        facts, files = index["metadata"], index["weight_map"]
        if (facts["version"], facts["digest"]) != (version, digest):
            raise ValueError("it holds another version")
        tensors = {}
        for file in sorted(set(files.values())):
            tensors.update(load_file(whole / file))
        if tensors.keys() != files.keys():
            raise ValueError("its index names other tensors")
        return OptimizerState(tensors, int(facts["steps"]))
    except Exception as error:
        logger.warning("%s cannot be read (%s): moments start anew", folder.name, error)
        return None


def _name(version: int, digest: str) -> str:
    return f"{version}-{digest[:16]}"


def _flush(path: Path) -> None:
    with path.open("rb") as written:
        os.fsync(written.fileno())
