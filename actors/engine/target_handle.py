"""Status and Serve handle of a target replica, for other processes: imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.actors.engine.request import GenerationChunk, GenerationRequest
from paceline.actors.handles import remote_method

if TYPE_CHECKING:
    from paceline.actors.engine.target import TargetReplica
    from paceline.actors.speculation.pool.client import ExpertStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The target's model as it runs.

    Attributes:
        model_type: of its config.
        dtype: of the weights.
        device: that it runs on.
        max_model_len: prompt and answer together, tokens.
        num_speculative_tokens: fixed number, None if the controller chooses.
        numerics: ``invariant`` or ``varying``.
        kv_block_size: positions of a KV block.
    """

    model_type: str
    dtype: str
    device: str
    max_model_len: int
    num_speculative_tokens: int | None
    numerics: str
    kv_block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus(ModelFacts):
    """Model and load of a target replica.

    Attributes:
        replica_id: Serve's.
        drafts: weight_version by slot.
        draft_failures: since the start.
        running: requests with a row.
        waiting: requests in the queue.
        kv_blocks_total: of the KV cache.
        kv_blocks_available: of these.
        preemptions: since the start.
        experts: of the pool; empty if drafts are colocated.
    """

    replica_id: str
    drafts: Mapping[str, int]
    draft_failures: int
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_available: int
    preemptions: int
    experts: Mapping[str, ExpertStats]


class ChunkStream(Protocol):
    """Response of TargetReplica.generate."""

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        """Iterate over the chunks."""

    def __anext__(self) -> Awaitable[GenerationChunk]:
        """The next chunk."""

    def cancel(self) -> None:
        """Abort the request; does nothing to one that has ended."""


class _Generate(Protocol):
    def remote(self, request: GenerationRequest, whole: bool) -> ChunkStream:
        """See TargetReplica.generate."""


class StreamingTarget(Protocol):
    """Handle whose calls stream."""

    @property
    def generate(self) -> _Generate:
        """See TargetReplica."""


class TargetHandle:
    """Serve handle of the target's deployment."""

    if TYPE_CHECKING:
        status = remote_method(TargetReplica.status)

        def options(self, *, stream: bool, _by_reference: bool = True) -> StreamingTarget:
            """The handle with other options, see Serve."""

        def broadcast(self, method: str, *arguments: Any) -> Any:
            """Call every replica; Serve's own response, which has no types."""
