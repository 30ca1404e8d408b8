"""Which prompts are turns of one conversation. Pure.

Turns of a conversation are much alike: records of which some are trained on and others judge would
make a draft look better than it is for others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import prompt_digest

_MOST = 2**14  # prompts that are remembered


@dataclass(slots=True)
class _Turn:
    """A prompt: the digest of its conversation's first one, and that of the prompt after it."""

    conversation: int
    following: int | None = None


class Conversations:
    """Finds the conversation of each prompt among the prompts before it.

    A prompt goes on with a conversation if it begins with an earlier prompt, whole. Of several
    that begin with the same one, only the first does: a beginning that many share is no
    conversation.
    """

    def __init__(self, cue: tuple[int, ...]) -> None:
        """Start without prompts; ``cue`` are the token ids that end every prompt of a chat."""
        self._cue = np.asarray(cue, dtype=np.int32)
        self._turns: OrderedDict[int, _Turn] = OrderedDict()  # by digest, oldest first

    def find(self, prompt: NDArray[np.int32]) -> int:
        """Digest of the first prompt of this one's conversation, its own if it is the first.

        Args:
            prompt: int32 ``[P]``, token ids; remembered for those that follow.
        """
        own = prompt_digest(prompt)
        turn = self._turns.pop(own, None)
        if turn is None:
            before = self._before(prompt)
            if before is not None and before.following in (None, own):
                before.following = own
                turn = _Turn(before.conversation)
            else:
                turn = _Turn(own)
        self._turns[own] = turn
        if len(self._turns) > _MOST:
            self._turns.popitem(last=False)
        return turn.conversation

    def _before(self, prompt: NDArray[np.int32]) -> _Turn | None:
        """The longest of the earlier prompts that this one begins with."""
        width = len(self._cue)
        for start in np.flatnonzero(prompt[: max(len(prompt) - width, 0)] == self._cue[0])[::-1]:
            end = int(start) + width
            if end < len(prompt) and np.array_equal(prompt[start:end], self._cue):
                known = self._turns.get(prompt_digest(prompt[:end]))
                if known is not None:
                    return known
        return None
