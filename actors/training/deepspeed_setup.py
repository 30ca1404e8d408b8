"""DeepSpeed's environment variables and its C++ op, which is built once by

    python -m paceline.actors.training.deepspeed_setup

(a minute of CPU). A trainer never compiles: without the op it uses plain gloo, which costs nothing
with a single rank.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import time
from pathlib import Path

LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)

_OP = "deepspeed_shm_comm"
_LOCK = "lock"


def extensions_dir() -> Path:
    """Folder of the op: ``PACELINE_OPS_DIR``, else in the interpreter's environment."""
    chosen = os.environ.get("PACELINE_OPS_DIR")
    return Path(chosen) if chosen else Path(sys.prefix) / "var" / "paceline" / "torch_extensions"


def prepare_environment(device: str = "auto") -> None:
    """Set the environment that DeepSpeed reads at import; call it once per process, early.

    The rank variables keep it from MPI; the address is a free port on loopback.

    Args:
        device: of the training; DeepSpeed's own choice is the GPU if there is one.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_dir())
    os.environ.setdefault("DS_BUILD_OPS", "0")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    # ninja is a wheel in the environment: it must be on the path.
    here = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if here not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([here, path])
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = found if device == "auto" else device


def clear_stale_locks() -> int:
    """Remove locks of killed builds, on which torch would wait for ever; returns their number.

    Call it only while no build is running. A trainer never compiles, and ignores a locked op.
    """
    stale = list(extensions_dir().glob(f"**/{_LOCK}"))
    for lock in stale:
        lock.unlink(missing_ok=True)
    return len(stale)


def op_is_built() -> bool:
    """Whether the op's library is there, without the lock of a running or killed build."""
    folder = extensions_dir() / _OP
    return (folder / f"{_OP}.so").is_file() and not (folder / _LOCK).exists()


def forbid_compiling() -> None:
    """Disable the op in DeepSpeed if it has not been built.

    Loading it would compile for a minute in the midst of serving. DeepSpeed falls back to plain
    gloo without it.
    """
    import deepspeed.ops

    if not op_is_built():
        logger.warning("DeepSpeed's %s is not built: training runs without it", _OP)
        deepspeed.ops.__compatible_ops__[_OP] = False


def build_cpu_ops() -> float:
    """Build DeepSpeed's shared-memory communication op; returns the seconds it took.

    Raises:
        RuntimeError: there is no C++ compiler, or compiling fails.
    """
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise RuntimeError("a C++ compiler (c++ or g++) is needed to build DeepSpeed's op")
    prepare_environment("cpu")
    extensions_dir().mkdir(parents=True, exist_ok=True)
    clear_stale_locks()
    started = time.monotonic()
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()
    return time.monotonic() - started


def free_port(address: str = LOOPBACK) -> int:
    """A free port on an address of this host."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Build the op and print the seconds it took."""
    try:
        seconds = build_cpu_ops()
    except RuntimeError as error:
        sys.stderr.write(f"paceline: {error}\n")
        return 1
    sys.stdout.write(f"paceline: DeepSpeed's op is ready ({seconds:.0f} s)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
