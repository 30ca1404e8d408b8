"""How much is imagined."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.actors.training.synthetic.prompts import TurnMarks


@dataclass(frozen=True, slots=True)
class ImaginationSettings:
    """Plain data; reaches an actor by pickle.

    Attributes:
        marks: of the target's chat template.
        per_record: records to make for each one that a topic has to learn from.
        held_out_fraction: of prompts, that judge drafts: none of these is answered.
        at_once: requests that the target has at a time.
        least_records: that a topic has before anything is imagined for it.
        refresh_s: between two looks where there was nothing to do.
        timeout_s: of calls to shards and board.
        seed: None is unseeded.
    """

    marks: TurnMarks
    per_record: float
    held_out_fraction: float
    at_once: int
    least_records: int = 8
    refresh_s: float = 1.0
    timeout_s: float = 10.0
    seed: int | None = None
