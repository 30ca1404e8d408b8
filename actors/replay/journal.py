"""A file of length-prefixed records, so that a killed shard comes back with what it had."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<I")


class Journal:
    """Append-only, rewritten whole when records must go.

    A record reaches the kernel with every append, so that it survives the death of the
    process, not of the machine.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or make the file; what a killed rewriting left goes."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._partial.unlink(missing_ok=True)
        self._file = self._path.open("ab")

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def read(self) -> Iterator[bytes]:
        """All whole records; what follows a torn one is left out."""
        with self._path.open("rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                (length,) = _HEADER.unpack(header)
                data = file.read(length)
                if len(data) < length:
                    break
                yield data

    def append(self, data: bytes) -> None:
        """Add a record."""
        self._file.write(_HEADER.pack(len(data)) + data)
        self._file.flush()

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace everything, atomically."""
        with self._partial.open("wb") as file:
            for data in records:
                file.write(_HEADER.pack(len(data)) + data)
        self._file.close()
        self._partial.replace(self._path)
        self._file = self._path.open("ab")
