"""Prompts that begin like an earlier one: which blocks hold the keys and values already.

Only full blocks are shared: nobody writes to them again, so nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


class PrefixIndex:
    """Finds blocks by the tokens that they and all blocks before them hold.

    A block's key is the place of the block before it and its own tokens, compared as they are:
    two different prompts never meet. Places are never used twice, so what followed a forgotten
    block is not found through the block that has taken its memory.
    """

    def __init__(self, block_size: int) -> None:
        """Know of nothing yet; ``block_size`` is in tokens."""
        self._size = block_size
        self._places = _ROOT
        self._found: dict[_Key, tuple[int, int]] = {}  # place, block
        self._key_of: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._found)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix of whole blocks, in order."""
        place, blocks = _ROOT, []
        for chunk in self._chunks(tokens):
            found = self._found.get((place, chunk))
            if found is None:
                break
            place, block = found
            blocks.append(block)
        return blocks

    def add(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Learn what blocks hold.

        Args:
            tokens: from the beginning; a last part that fills no block is left out.
            blocks: where the keys and values of these tokens are.

        Returns:
            the blocks that are known by this call; where another block is known to hold the
            same, the new one is not needed.
        """
        place, added = _ROOT, []
        for chunk, block in zip(self._chunks(tokens), blocks, strict=False):
            key = (place, chunk)
            if key not in self._found:
                self.forget(block)  # what was before it may have been known elsewhere, and gone
                self._places += 1
                self._found[key] = self._places, block
                self._key_of[block] = key
                added.append(block)
            place, _ = self._found[key]
        return added

    def forget(self, block: int) -> None:
        """A block's memory goes to something else; unknown ones are fine."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._found[key]

    def forget_all(self) -> None:
        """Know of nothing any more."""
        self._found.clear()
        self._key_of.clear()

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._size + 1, self._size):
            yield tuple(tokens[start : start + self._size])
