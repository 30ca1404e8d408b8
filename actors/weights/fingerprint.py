"""Which models a set of weight versions belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_FILES = ("config.json", "tokenizer.json")
_CHUNK = 2**20


def fingerprints(target: str | Path, drafts: Mapping[str, str | Path]) -> dict[str, str]:
    """Topic to the fingerprint of the target and that topic's initial draft.

    A topic that gets another draft, another topic's included, gets another fingerprint; the
    other topics keep theirs, and with it their versions.

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
