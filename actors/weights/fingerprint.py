"""Which models a set of weight versions belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_FILES = ("config.json", "tokenizer.json")
_CHUNK = 2**20


def fingerprint(folders: Iterable[str | Path]) -> str:
    """Hex digest of the configs, tokenizers and weights in some model folders, in order.

    Args:
        folders: the target's, then those of the initial drafts.
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
