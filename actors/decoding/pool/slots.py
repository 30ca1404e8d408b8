"""The slots of an expert of the pool: what is put into them, and what could not be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from paceline.actors.decoding.experts import ExpertStack
from paceline.actors.decoding.mixtures import Mixtures
from paceline.actors.weights.slots import is_candidate


class ExpertSlots:
    """Stable weights, a candidate's, and the initial ones, of one expert.

    Attributes:
        failed_candidate: weight_version of the last one that was given up; other threads read it.
        mixtures: the stable slot, where a load of it broke off.
    """

    def __init__(self, stack: ExpertStack) -> None:
        """Take the stack whose slots they are."""
        self._stack = stack
        self.failed_candidate: int | None = None
        self.mixtures = Mixtures()

    @property
    def versions(self) -> dict[str, int]:
        """weight_version by slot; a candidate only where there is one."""
        return dict(self._stack.versions)

    def put(self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Put weights into a slot, or with None empty a candidate's.

        Raises:
            KeyError: for a slot that is not here.
            ValueError: for weights of another shape; a stable slot is what it was.
            Exception: whatever else loading raises, of memory too; a stable slot is a mixture then.
                After any of these a candidate's slot is empty, and its trial has failed.
        """
        if state is None:
            self._stack.withdraw(slot)
            return
        try:
            self._stack.swap(slot, weight_version, state)
        except Exception as error:
            self.mixtures.note(slot, weight_version, state, error)
            if is_candidate(slot):
                self.failed_candidate = weight_version
                self._stack.withdraw(slot)
            raise
        self.mixtures.over(slot)

    def give_up(self, drafts: Iterable[str]) -> None:
        """Empty the candidate's slot where it is among drafts that failed."""
        for draft in drafts:
            if is_candidate(draft) and draft in self._stack.versions:
                self.failed_candidate = self._stack.version(draft)
                self._stack.withdraw(draft)

    def spoiled(self, draft: str) -> bool:
        """Whether a draft's proposals would come from a mixture."""
        return bool(self.mixtures) and self.mixtures.spoil(draft, self._stack.versions)
