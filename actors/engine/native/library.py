"""Build and load the C++ kernels; they compile in half a minute, once per machine and version.

Without a compiler the engine uses torch operations, which are slower, and whose results may differ
in the last bits between batches of different shapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from paceline.actors.atomic_file import replace_file
from paceline.actors.processor import cpuinfo, has_tiles

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = (
    *("numbers.h", "threads.h", "products.h", "codes.h", "tiles.h", "layers.h"),
    *("attention.h", "forward.h", "tokens.h", "rollout.h", "suffixes.h"),
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "--param=avoid-fma-max-bits=0",  # a sum is fused in every tile, or its bits would differ
    "-shared",
    "-fPIC",
    "-pthread",
)
_FLAGS_OF_VENDOR = {"GenuineIntel": ("-DPACELINE_MULTIPLY_ADDS",)}  # see products.h
# Wide vectors make prompts 5 % faster there; they were timed on no other processor.
_FLAGS_OF_TILES = ("-DPACELINE_TILES_ALLOWED", "-mprefer-vector-width=512")
_TIMEOUT_S = 600  # of a start, for compiling and for waiting until another process has compiled
_POLL_S = 0.1


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if need be, or None if the machine has no compiler."""
    flags = [*_FLAGS, *_FLAGS_OF_VENDOR.get(cpuinfo("vendor_id"), ())]
    flags += _FLAGS_OF_TILES if has_tiles() else ()
    texts = [_SOURCE.with_name(name).read_text("utf-8") for name in (_SOURCE.name, *_HEADERS)]
    processor = f"{platform.machine()} {cpuinfo('flags') or cpuinfo('Features')}"
    key = hashlib.sha256("\0".join([*texts, *flags, processor]).encode()).hexdigest()
    places = [folder / f"kernels-{key[:16]}.so" for folder in _folders()]
    for place in places:
        with contextlib.suppress(OSError):  # there is none, or a crash has left it broken
            return ctypes.CDLL(str(place))
    for place in places:
        try:
            return _build(place, flags)
        except OSError as error:
            logger.warning("no CPU kernels in %s: %s", place.parent, error)
        except (RuntimeError, subprocess.SubprocessError) as error:
            logger.warning("the CPU kernels do not compile: %s", error)
            break
    logger.warning("no CPU kernels, torch is used instead")
    return None


def _build(place: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile the kernels unless another process does so, and load them.

    Raises:
        OSError: the folder cannot be written, or the library in it cannot be loaded.
        RuntimeError: there is no compiler, it fails, or another process compiles for too long.
        subprocess.TimeoutExpired: it takes too long.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("ab") as lock:
        _acquire(lock, deadline)
        with contextlib.suppress(OSError):  # built by another process in the meantime
            return ctypes.CDLL(str(place))
        replace_file(place, lambda output: _compile(output, flags, deadline))
    return ctypes.CDLL(str(place))


def _acquire(lock: IO[bytes], deadline: float) -> None:
    """Wait until no other process compiles, or until a monotonic time.

    Raises:
        RuntimeError: another process still compiles then.
    """
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError("another process compiles for too long") from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks: each process compiles
            return


def _compile(output: Path, flags: Sequence[str], deadline: float) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler on PATH")
    command = [compiler, *flags, str(_SOURCE), "-o", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            _, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its children compile, and would go on
            raise
    if process.returncode:
        raise RuntimeError(f"{compiler} failed: {errors.strip()[-500:]}")


def _folders() -> list[Path]:
    """Return ``PACELINE_OPS_DIR``, or the interpreter's environment and the user's cache."""
    chosen = os.environ.get("PACELINE_OPS_DIR")
    if chosen:
        return [Path(chosen)]
    folders = [Path(sys.prefix) / "var" / "paceline"]
    with contextlib.suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(cache / "paceline")
    return folders
