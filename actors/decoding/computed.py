"""How far a draft has computed each sequence, and which of its drafts came true. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.actors.decoding.proposer import DraftRow


class Computed:
    """Per sequence: who drafts for it, the positions that are right, and the drafts after them.

    A position is right where its keys and values are those of the sequence's own token by the
    weights of today.
    """

    def __init__(self) -> None:
        """No sequences yet."""
        self._drafts: dict[str, str] = {}
        self._right: dict[str, int] = {}
        self._drafted: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._drafts))

    def latest(self) -> list[str]:
        """All sequences, those that came last first."""
        return list(reversed(self._drafts))

    def draft(self, request_id: str) -> str:
        """Who drafts for a sequence."""
        return self._drafts[request_id]

    def begin(self, request_id: str, draft: str) -> None:
        """A sequence comes; nothing of it is computed."""
        self._drafts[request_id] = draft
        self._right[request_id] = 0

    def end(self, request_id: str) -> None:
        """A sequence goes."""
        del self._drafts[request_id]
        self._right.pop(request_id, None)
        self._drafted.pop(request_id, None)

    def lose(self, request_id: str) -> None:
        """Nothing of a sequence is right any more."""
        self._right[request_id] = 0
        self._drafted.pop(request_id, None)

    def right(self, request_id: str) -> int:
        """Positions that are right; 0 of an unknown sequence."""
        return self._right.get(request_id, 0)

    def reach(self, request_id: str, end: int) -> None:
        """Positions up to ``end`` are right."""
        self._right[request_id] = end

    def drafted(self, request_id: str, length: int, tokens: list[int]) -> None:
        """A whole sequence is right, and ``tokens`` were drafted behind it."""
        self._right[request_id] = length
        self._drafted[request_id] = tokens

    def lacks(self, request_id: str, length: int) -> int:
        """See ExpertStack.lacks."""
        drafted = max(len(self._drafted.get(request_id, ())) - 1, 0)
        return max(length - 2 - self.right(request_id) - drafted, 0)

    def presume(self, request_id: str, length: int, assumed: Sequence[int]) -> None:
        """See ExpertStack.presume."""
        right = self.right(request_id)
        if right > length:
            drafted = self._drafted.get(request_id, ())
            self._drafted[request_id] = [*assumed[: right - length], *drafted]
            self._right[request_id] = length

    def settle(self, row: DraftRow) -> int:
        """Count the drafts that came true among what is right; returns how much that is now."""
        known = self._right[row.request_id]
        for token in self._drafted.pop(row.request_id, [])[:-1]:  # the last was never fed back
            if known >= len(row.tokens) or row.tokens[known] != token:
                break
            known += 1
        self._right[row.request_id] = known
        return known
