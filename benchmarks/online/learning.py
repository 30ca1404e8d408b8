"""How much is learnt, and imagined, in a unit of work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from online.serving import ROWS
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.settings import DistillerSettings

NEVER = 1_000_000  # rejections in a row
CAPACITY_MB = ReplaySettings().capacity_bytes // 2**20


@dataclass(frozen=True, slots=True)
class Learning:
    """How much the trainer may do, and how.

    Attributes:
        requests_per_round: served requests between two rounds of training.
        micro_steps: of a round, each of ``micro_batch`` records.
        learning_rate: constant.
        micro_batch: records.
        train_records: drawn from replay for a round.
        held_out_records: that the gate judges by, at most.
        held_out_fraction: of the prompts, kept from training for the gate.
        max_rejections: fruitless ones in a row, after which a topic rests.
        recent_share: share of a draw that favours recent records; the rest is uniform.
        seed: of drawing and of the batches' order.
    """

    requests_per_round: int = 16
    micro_steps: int = 32
    learning_rate: float = 1.5e-3
    micro_batch: int = 8
    train_records: int = 256
    held_out_records: int = 256
    held_out_fraction: float = 0.1
    max_rejections: int = 3
    recent_share: float = 0.5
    seed: int = 0


# Of so few prompts a tenth would leave the gate nothing to judge by.
QUICK = Learning(held_out_fraction=0.3)


@dataclass(frozen=True, slots=True)
class Imagining:
    """What the idle target and the idle trainer add to a stream.

    Attributes:
        per_record: prompts that the target makes up for each of the stream's, at most.
        micro_steps: of a round of training, in place of ``Learning.micro_steps``.
        capacity_mb: of the topic's replay: where it is full, nothing more is imagined.
        held_out_fraction: in place of ``Learning``'s: what is imagined does not judge, so that
            more of what is real may; 0 keeps that.
        rate_hold_steps: see DistillerSettings.
        average_decay: see DistillerSettings.
        min_gain: see GateSettings.
        at_once: requests that the target has while it imagines.
        dtype: that it computes in while it imagines; all else computes as the bench does.
    """

    per_record: float
    micro_steps: int
    capacity_mb: int = CAPACITY_MB
    held_out_fraction: float = 0.0
    rate_hold_steps: int = DistillerSettings().rate_hold_steps
    average_decay: float = DistillerSettings().average_decay
    min_gain: float = GateSettings().min_gain
    at_once: int = ROWS
    dtype: str = "auto"

    def of(self, learning: Learning) -> Learning:
        """The same learning with these steps, no round going over its own draw again and again."""
        drawn = max(learning.train_records, self.micro_steps * learning.micro_batch)
        held_out = self.held_out_fraction or learning.held_out_fraction
        return replace(
            learning,
            micro_steps=self.micro_steps,
            train_records=drawn,
            held_out_fraction=held_out,
        )

    def facts(self) -> dict[str, Any]:
        """All of it that is not as it once was for all: what no key of old names."""
        usual = Imagining(self.per_record, self.micro_steps)
        named = {name for name in asdict(self) if getattr(self, name) != getattr(usual, name)}
        return {name: value for name, value in asdict(self).items() if name in named}


def tireless(learning: Learning) -> Learning:
    """The same, but no draft rests after rejected rounds.

    One draft that rests has all of its system at rest, one expert of several has not: systems
    are to have the same micro-steps.
    """
    return replace(learning, max_rejections=NEVER)
