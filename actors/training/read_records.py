"""Whether records that a round has read may still be used. Pure."""

from __future__ import annotations

import math

from paceline.actors.training.topic_stats import StatsByTopic


class ReadRecords:
    """Purge and retention for copies of records, which do not reach them outside the shards.

    Attributes:
        usable_from: creation, unix seconds, of the oldest records that are within retention.
    """

    def __init__(self, stats: StatsByTopic) -> None:
        """Watch over records that are read from now on.

        Args:
            stats: of the shards that they come from, by topic; of no others.
        """
        self._purges = {topic: shard.purges_total for topic, shard in stats.items()}
        self.usable_from = -math.inf

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._purges)

    def update(self, stats: StatsByTopic) -> bool:
        """Take later statistics of any shards; whether records were purged since the first ones."""
        later = {topic: shard for topic, shard in stats.items() if topic in self._purges}
        self.usable_from = max([self.usable_from, *(s.retained_from for s in later.values())])
        return any(shard.purges_total != self._purges[topic] for topic, shard in later.items())
