"""Processes of a running application below this process, by role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import psutil

# Ray writes what a process is into its title: ray::Class or ray::Class.method for an actor.
TITLES = {
    "target": "ray::ServeReplica:paceline:target",
    "expert": "ray::ServeReplica:paceline:expert-",  # if drafts have deployments of their own
    "router": "ray::ServeReplica:paceline:router",
    "ingress": "ray::ServeReplica:paceline:ingress",
    "controller": "ray::ServeController",
    "trainer": "ray::TrainerActor",
    "registry": "ray::MeteredWeightRegistry",
    "shard": "ray::MeteredShardHost",
    "scheduler": "ray::MeteredTrainerScheduler",
}


def ours() -> Iterator[tuple[str, psutil.Process]]:
    """Every process below this one with its role, or its title's first word."""
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
            if words and process.status() != psutil.STATUS_ZOMBIE:
                yield _role(words[0]), process
        except psutil.Error:
            continue


def _role(title: str) -> str:
    for role, prefix in TITLES.items():
        if _begins(title, prefix):
            return role
    return title.split(" ")[0].rsplit("/", 1)[-1]


def _begins(title: str, prefix: str) -> bool:
    whole_word = prefix.endswith("-") or title[len(prefix) :][:1] in ("", ".", ":", " ")
    return title.startswith(prefix) and whole_word


def seconds() -> dict[int, tuple[str, float]]:
    """Role and processor seconds of all processes below this one, and of it (``client``)."""
    used = {}
    for role, process in ours():
        try:
            used[process.pid] = role, _used(process)
        except psutil.Error:
            continue
    used[os.getpid()] = "client", _used(psutil.Process())
    return used


def since(before: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """Processor seconds by role since ``before``; those of processes that have ended are lost."""
    client = _used(psutil.Process())  # before it looks for the others, which takes its time
    spent: dict[str, float] = {}
    for pid, (role, used) in (seconds() | {os.getpid(): ("client", client)}).items():
        spent[role] = spent.get(role, 0.0) + used - before.get(pid, ("", 0.0))[1]
    return {role: round(used, 2) for role, used in spent.items()}


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def of(role: str) -> list[psutil.Process]:
    """The processes of a role, the oldest first."""
    return sorted((p for name, p in ours() if name == role), key=lambda p: (p.create_time(), p.pid))


def of_expert(expert: str) -> list[psutil.Process]:
    """The processes of one expert of a pool, in no order."""
    found = []
    for process in of("expert"):
        try:
            if _begins(process.cmdline()[0], TITLES["expert"] + expert):
                found.append(process)
        except (psutil.Error, IndexError):  # it has just ended
            continue
    return found
