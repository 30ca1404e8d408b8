"""The actor that holds replay shards, and the handle of one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from paceline.actors.handles import remote_method
from paceline.actors.replay.buffer import ReplaySettings, ShardStats
from paceline.actors.replay.shard import FILE_SUFFIX, ReplayShard, ShardHandle

logger = logging.getLogger(__name__)


def host_of(topic: str, hosts: int) -> int:
    """Index of the host, of so many, that has a topic's shard; the same in every process."""
    return crc32(topic.encode()) % hosts


def remove_records(folder: Path) -> None:
    """Remove what shards have kept in a folder: nothing would let it expire, or purge it."""
    for pattern in (f"*{FILE_SUFFIX}", f".*{FILE_SUFFIX}.partial"):
        for file in folder.glob(pattern):
            logger.warning("%s is removed: the configuration keeps no such records", file)
            try:
                file.unlink(missing_ok=True)
            except OSError:
                logger.exception("%s holds prompts and answers, and cannot be removed", file)


class ShardHost:
    """Replay shards of several topics in one process.

    A process of Ray's takes processor time and memory even if nothing calls it.
    """

    def __init__(
        self,
        index: int,
        hosts: int,
        topics: Iterable[str],
        settings: ReplaySettings,
        folder: str,
        *,
        persist: bool,
    ) -> None:
        """Open the shards of topics, and of those whose records are on disk: they have to expire.

        Args:
            index: of this host.
            hosts: their number.
            topics: of all hosts; the shard of another topic is opened when it is first called.
            settings: of every shard.
            folder: of records on disk.
            persist: whether shards keep them there; if not, those of before are removed.
        """
        self._settings = settings
        self._persist_dir = folder if persist else None
        if not persist:
            remove_records(Path(folder))
        self._shards: dict[str, ReplayShard] = {}
        for topic in topics:
            if host_of(topic, hosts) == index:
                self._shard(topic)
        files = sorted(Path(folder).glob(f"*{FILE_SUFFIX}"))
        for topic in (file.name.removesuffix(FILE_SUFFIX) for file in files):
            if host_of(topic, hosts) == index:
                try:
                    self._shard(topic)
                except OSError:  # of a topic that nothing may need: the others go on
                    logger.warning("the records of %s cannot be read", topic, exc_info=True)

    def call(self, topic: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of a topic's shard, see :class:`HostedShard`."""
        return getattr(self._shard(topic), method)(*arguments, **named)

    def stats(self) -> list[ShardStats]:
        """Statistics of all shards; thread-safe."""
        return [shard.stats() for shard in list(self._shards.values())]

    def topics(self) -> list[str]:
        """Topics of all shards, also of those on disk that are configured no more."""
        return list(self._shards)

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def _shard(self, topic: str) -> ReplayShard:
        if topic not in self._shards:
            self._shards[topic] = ReplayShard(topic, self._settings, self._persist_dir)
        return self._shards[topic]


class ShardHostHandle:
    """Actor handle of a ShardHost."""

    call = remote_method(ShardHost.call)
    topics = remote_method(ShardHost.topics)
    ping = remote_method(ShardHost.ping)


def shard_of(topic: str, hosts: Sequence[ShardHostHandle]) -> HostedShard:
    """The shard of a topic in the host, of all of them in their order, that has it."""
    return HostedShard(hosts[host_of(topic, len(hosts))], topic)


@dataclass(frozen=True, slots=True)
class _HostedMethod:
    host: ShardHostHandle
    topic: str
    name: str

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Call the method and return Ray's reference."""
        return self.host.call.remote(self.topic, self.name, *arguments, **named)


_METHODS = [name for name in vars(ShardHandle) if not name.startswith("_")]


class HostedShard(ShardHandle):
    """A topic's shard in a ShardHost, with the interface of an actor handle; picklable."""

    def __init__(self, host: ShardHostHandle, topic: str) -> None:
        """Take the host's actor handle."""
        self._host, self._topic = host, topic
        for name in _METHODS:
            setattr(self, name, _HostedMethod(host, topic, name))

    def __reduce__(self) -> tuple[type[HostedShard], tuple[ShardHostHandle, str]]:
        return HostedShard, (self._host, self._topic)
