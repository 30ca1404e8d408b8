"""Outcomes of a topic's rounds in a row, which decide when its training pauses."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Outcomes of a topic's rounds, each counted in a row, whichever trainer had the round.

    Attributes:
        stable: the stable weight_version.
        rejections: rounds without a gain.
        fruitless: rounds, up to the last, whose gain had no prospect.
        rolled_back: candidates that went on trial against that version and were rolled back.
    """

    stable: int = 0
    rejections: int = 0
    fruitless: int = 0
    rolled_back: int = 0

    def beside(self, stable: int) -> RoundCounts:
        """The counts beside a stable version; rollbacks beside an earlier one are over."""
        return self if stable <= self.stable else replace(self, stable=stable, rolled_back=0)

    def rejected(self, *, hopeless: bool) -> RoundCounts:
        """After a rejected round; one with hope ends those without, but for the rollbacks."""
        fruitless = self.fruitless + 1 if hopeless else min(self.fruitless, self.rolled_back)
        return replace(self, rejections=self.rejections + 1, fruitless=fruitless)

    def published(self) -> RoundCounts:
        """After a publication; its rollback counts the earlier ones again."""
        return replace(self, rejections=0, fruitless=0)

    def withdrawn(self) -> RoundCounts:
        """After the rollback of what was published."""
        return replace(self, rolled_back=self.rolled_back + 1).restarted()

    def restarted(self) -> RoundCounts:
        """With a candidate that starts from the stable weights: only rollbacks count.

        What passes the gate and fails with live requests must not be tried for ever.
        """
        return replace(self, rejections=self.rolled_back, fruitless=self.rolled_back)

    def outgrown(self) -> RoundCounts:
        """With a candidate that starts over on many more records; the gate's looks go on."""
        return replace(self, fruitless=0)
