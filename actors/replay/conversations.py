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

    A prompt goes on with a conversation if it begins with an earlier prompt, but for the last token
    of its cue: a line break there and one that the answer begins with may be one token later. Of
    several that begin with the same one, only the first does: a beginning that many share is no
    conversation.
    """

    def __init__(self, cue: tuple[int, ...]) -> None:
        """Start without prompts; ``cue`` are the token ids that end every prompt of a chat."""
        self._cue = np.asarray(cue, dtype=np.int32)
        self._kept = self._cue[:-1] if len(cue) > 1 else self._cue  # in later prompts
        self._turns: OrderedDict[int, _Turn] = OrderedDict()  # by digest, oldest first

    def find(self, prompt: NDArray[np.int32]) -> int:
        """Digest of the first prompt of this one's conversation, its own if it is the first.

        Args:
            prompt: int32 ``[P]``, token ids; remembered for those that follow.
        """
        width = len(self._cue)
        is_chat = np.array_equal(prompt[-width:], self._cue)
        kept = prompt[: len(prompt) - width + len(self._kept)] if is_chat else prompt
        own = prompt_digest(kept)
        turn = self._turns.pop(own, None)
        if turn is None:
            before = self._before(kept)
            if before is not None and before.following in (None, own):
                before.following = own
                turn = _Turn(before.conversation)
            else:
                turn = _Turn(prompt_digest(prompt))
        self._turns[own] = turn
        if len(self._turns) > _MOST:
            self._turns.popitem(last=False)
        return turn.conversation

    def _before(self, prompt: NDArray[np.int32]) -> _Turn | None:
        """The longest of the earlier prompts that this one begins with."""
        width = len(self._kept)
        for start in np.flatnonzero(prompt[: max(len(prompt) - width, 0)] == self._kept[0])[::-1]:
            end = int(start) + width
            if np.array_equal(prompt[start:end], self._kept):
                known = self._turns.get(prompt_digest(prompt[:end]))
                if known is not None:
                    return known
        return None
