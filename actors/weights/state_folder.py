"""Lock and fingerprints of a state folder.

The lock is an flock on ``<folder>/.lock``, which the kernel releases when the process dies: a
registry that was killed gets its folder back, a second server does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

_FILES = ("config.json", "tokenizer.json")
_CHUNK = 2**20


def fingerprints(target: str | Path, drafts: Mapping[str, str | Path]) -> dict[str, str]:
    """Topic to the fingerprint of the target and that topic's initial draft.

    A topic with another initial draft has another fingerprint, and starts without versions; the
    other topics keep theirs.

    Args:
        target: the target's folder.
        drafts: topic to the folder of its initial draft.
    """
    known = {folder: fingerprint([target, folder]) for folder in set(map(str, drafts.values()))}
    return {topic: known[str(folder)] for topic, folder in drafts.items()}


def fingerprint(folders: Iterable[str | Path]) -> str:
    """Hex digest of the configs, tokenizers and weights in some model folders, in order.

    Args:
        folders: of models.
    """
    digest = hashlib.sha256()
    for folder in folders:
        weights = sorted(Path(folder).glob("*.safetensors"))
        for path in [Path(folder) / name for name in _FILES] + weights:
            digest.update(f"\0{path.name}\0".encode())
            if not path.is_file():
                continue
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:16]


logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_WAIT_S = 5.0  # the kernel ends a killed process a moment after it is reported dead
_POLL_S = 0.05

_held: dict[Path, IO[bytes]] = {}


class StateFolderLockedError(RuntimeError):
    """Another process has locked the folder."""


def lock_folder(folder: str | Path, wait_s: float = _WAIT_S) -> None:
    """Lock a folder until this process ends; a second call in the process does nothing.

    A file system without locks is used without one, with a warning.

    Args:
        folder: created if it is missing.
        wait_s: longest wait for another process to release it, seconds.

    Raises:
        StateFolderLockedError: another process does not release it.
    """
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    place = place.resolve()
    if place in _held:
        return
    file = (place / LOCK_NAME).open("ab")
    deadline = time.monotonic() + wait_s
    while not _try_lock(file):
        if time.monotonic() >= deadline:
            file.close()
            raise StateFolderLockedError(f"{place} is in use by another server")
        time.sleep(_POLL_S)
    _held[place] = file


def is_locked(folder: str | Path) -> bool:
    """Whether another process has locked the folder."""
    place = Path(folder).absolute().resolve()
    path = place / LOCK_NAME
    if place in _held or not path.is_file():
        return False
    with path.open("rb") as file:
        return not _try_lock(file)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.warning("%s: locks are not supported here, continuing without", file.name)
    return True
