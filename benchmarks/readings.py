"""What a running application holds now: memory, files, sockets per process; Ray's store."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import processes
import psutil


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds: bytes resident and proportional, open files, sockets, threads."""

    role: str
    pid: int
    rss: int
    pss: int
    files: int
    sockets: int
    threads: int

    @property
    def name(self) -> str:
        """Role and pid."""
        return f"{self.role}/{self.pid}"

    @property
    def ours(self) -> bool:
        """True for the parts of Paceline; Ray's own workers come and go."""
        return self.role in processes.TITLES


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at everything, ``at`` seconds; ``object_store`` are bytes in use.

    ``blocks_held`` are blocks of the target's key/value memory that a request owns. Those that the
    prefix cache only remembers are not among them: any request may take them.
    """

    at: float
    processes: tuple[Held, ...]
    object_store: int
    running: int
    waiting: int
    versions: int
    blocks_held: int

    @property
    def pss(self) -> int:
        """Proportional bytes of all processes together."""
        return sum(held.pss for held in self.processes)

    def values(self) -> dict[str, float]:
        """Every figure that must not grow, by its name.

        The sums see what the series of single processes cannot: a new process each time.
        """
        found: dict[str, float] = {
            "Ray's object_store": float(self.object_store),
            "all processes": float(len(self.processes)),
            "all pss": float(self.pss),
        }
        for held in self.processes:
            for measure in ("rss", "pss", "files", "sockets", "threads"):
                found[f"{held.name} {measure}"] = float(getattr(held, measure))
        return found

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def read(url: str, at: float) -> Reading:
    """Look at the application at ``url``, whose processes are below this one."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        status = (await http.get("/v1/paceline/status")).json()
    target, versions = status["target"], status.get("weight_versions", {})
    return Reading(
        at=at,
        processes=await asyncio.to_thread(_every_process),
        object_store=await asyncio.to_thread(object_store_bytes),
        running=target.get("running", -1),
        waiting=target.get("waiting", -1),
        versions=sum(count for count in versions.values() if isinstance(count, int)),
        blocks_held=blocks_held(target),
    )


def blocks_held(target: dict[str, Any]) -> int:
    """Blocks that requests own, from a target's description of itself; -1 where it gives none."""
    if "kv_blocks_total" not in target:
        return -1
    return int(target["kv_blocks_total"] - target["kv_blocks_available"])


def _every_process() -> tuple[Held, ...]:
    return tuple(held for role, process in processes.ours() if (held := _held(role, process)))


def _held(role: str, process: psutil.Process) -> Held | None:
    try:
        memory = process.memory_full_info()
        open_files = [_target(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        return Held(
            role=role,
            pid=process.pid,
            rss=memory.rss,
            pss=memory.pss,
            files=len(open_files),
            sockets=sum(name.startswith("socket:") for name in open_files),
            threads=process.num_threads(),
        )
    except (psutil.Error, OSError):  # it has just ended
        return None


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def object_store_bytes() -> int:
    """Bytes in use in the object store of this node; Ray has no public call for it."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["Alive"])
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(stats.store_stats.object_store_bytes_used)
