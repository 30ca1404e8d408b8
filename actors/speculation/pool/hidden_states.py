"""The target's hidden states of sequences whose EAGLE drafts are in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.actors.speculation.proposer import DraftRow

# ``read(row, start, stop)``: states of a row's positions in the target's KV cache, as `to_bytes`.
RowReader = Callable[[int, int, int], bytes]


def num_states(num_cached_tokens: int, num_tokens: int) -> int:
    """Hidden states that travel with the tokens behind ``num_cached_tokens`` others.

    The target has computed every token but a sequence's last, so the state of the position before
    goes with each token; there is none before the first.
    """
    return num_tokens if num_cached_tokens else max(num_tokens - 1, 0)


def state_bytes(hidden_size: int) -> int:
    """Bytes of one state as it travels, see `to_bytes`."""
    return 2 * hidden_size


def to_bytes(states: Tensor) -> bytes:
    """Hidden states ``[n, H]`` of any device and dtype as bfloat16 bytes."""
    return states.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy().tobytes()


class ReceivedStates:
    """Hidden states of an expert's sequences, all of them: new weights compute them again.

    Attributes:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start without sequences; states are kept in that dtype, on that device."""
        self.hidden_size = hidden_size
        self._dtype, self._device = dtype, device
        self._states: dict[str, tuple[Tensor, int]] = {}  # with the number that is filled

    def fits(self, data: bytes, count: int) -> bool:
        """Whether data are so many states."""
        return len(data) == count * state_bytes(self.hidden_size)

    def extend(self, key: str, data: bytes) -> None:
        """Append states to a sequence's."""
        new = torch.frombuffer(bytearray(data), dtype=torch.bfloat16) if data else torch.empty(0)
        new = new.view(-1, self.hidden_size)
        empty = torch.empty(0, self.hidden_size, dtype=self._dtype, device=self._device)
        states, count = self._states.get(key, (empty, 0))
        if count + len(new) > len(states):
            grown = empty.new_empty(max(2 * len(states), count + len(new)), self.hidden_size)
            grown[:count] = states[:count]
            states = grown
        states[count : count + len(new)] = new
        self._states[key] = states, count + len(new)

    def drop(self, key: str) -> None:
        """Drop a sequence's states; unknown ones are fine."""
        self._states.pop(key, None)

    def read(self, rows: Sequence[DraftRow], positions: Tensor) -> Tensor:
        """Return the states ``[B, T, H]`` of int64 ``[B, T]`` positions, zeros before the first."""
        shape = (*positions.shape, self.hidden_size)
        found = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for own, row, at in zip(found, rows, positions, strict=True):
            states, _ = self._states[row.request_id]
            if len(states):
                own.copy_(states[at.clamp(min=0)])
        return found.masked_fill_(positions[..., None] < 0, 0.0)
