"""Proposer over experts in processes of their own."""

from __future__ import annotations

import itertools
import logging
import selectors
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.speculation.colocated import merge
from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.pool.client import ExpertClient, ExpertStats
from paceline.actors.speculation.pool.connection import Connection, ConnectionLostError
from paceline.actors.speculation.pool.hidden_states import RowReader, to_bytes
from paceline.actors.speculation.pool.messages import (
    DraftResponse,
    Float32,
    Int32,
    Pong,
    ProtocolError,
    Welcome,
)
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import expert_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """A request of the present round; ``indices`` are its rows' places in the batch."""

    client: ExpertClient
    indices: list[int]
    rows: list[DraftRow]


class PoolProposer:
    """Requests drafts from all experts of a round at once, and waits for them up to a timeout.

    Rows of a dead or slow expert draft nothing; its circuit breaker then keeps rounds from waiting
    for it until it answers again. :meth:`add_client`, :meth:`attach`, :meth:`needs_connection`,
    :meth:`wait_connected` and :meth:`stats` may be called from any thread, all else from the
    engine's alone.
    """

    def __init__(
        self,
        experts: Sequence[str],
        *,
        device: torch.device,
        vocab_size: int,
        round_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create clients without connections.

        Args:
            experts: their names; each also serves its initial weights (``sql@0``).
            device: of the proposals.
            vocab_size: of the target; a response with other tokens ends its connection.
            round_timeout_s: how long a round waits for responses.
            clock: seconds, monotonic.
        """
        self._clients = {name: ExpertClient(name) for name in experts}
        self._device = device
        self._vocab_size = vocab_size
        self._timeout_s = round_timeout_s
        self._clock = clock
        self._rounds = itertools.count(1)
        self._expert_of: dict[str, str] = {}  # by request_id
        self._read_states: RowReader | None = None
        self._connected = threading.Condition()
        self._new_connections: dict[str, tuple[Connection, Welcome]] = {}  # guarded by it
        self.timed_out = False
        self.prefilled = DraftPrefill()  # experts read while the target works
        self.faulty: frozenset[str] = frozenset()  # an expert handles its faulty drafts itself

    def keep_hidden(self, kv: KVCache) -> None:
        """Send the hidden states that the target's KV cache keeps to experts that read them."""

        def read(row: int, start: int, stop: int) -> bytes:
            return to_bytes(
                kv.read_hidden([row], torch.arange(start, stop, device=kv.device)[None])[0]
            )

        self._read_states = read

    def add_client(self, expert: str) -> None:
        """Draft with a further expert, once it is connected; a known one is fine."""
        if expert not in self._clients:  # a new dictionary: rounds may be reading the old one
            self._clients = {**self._clients, expert: ExpertClient(expert)}

    def attach(self, expert: str, connection: Connection, welcome: Welcome) -> None:
        """Use a connection from the next round on, in place of an earlier one."""
        with self._connected:
            replaced = self._new_connections.pop(expert, None)
            self._new_connections[expert] = connection, welcome
            self._clients[expert].needs_connection = False
            self._connected.notify_all()
        if replaced is not None:
            replaced[0].close()

    def needs_connection(self, expert: str) -> bool:
        """Return whether an expert has no connection, or has lost it."""
        return self._clients[expert].needs_connection

    def wait_connected(self, timeout_s: float) -> list[str]:
        """Wait until every expert is connected; return those that are by then."""
        with self._connected:
            self._connected.wait_for(
                lambda: not any(client.needs_connection for client in self._clients.values()),
                timeout_s,
            )
        return [name for name, client in self._clients.items() if not client.needs_connection]

    def stats(self) -> dict[str, ExpertStats]:
        """Return the state and counts of every expert."""
        return {name: client.stats() for name, client in self._clients.items()}

    def drafts(self) -> dict[str, int]:
        """Every draft with the weight_version of its expert's latest response."""
        known = {name + suffix: 0 for name in self._clients for suffix in ("", INITIAL_SUFFIX)}
        for name, client in self._clients.items():
            known |= {d: v for d, v in client.weight_versions.items() if expert_of(d) == name}
        return known

    def version(self, draft: str) -> int:
        """The weight_version that a draft last proposed with: the stable one's if it has none."""
        expert = expert_of(draft)
        versions = self._clients[expert].weight_versions
        return versions.get(draft if draft in versions else expert, 0)

    def num_models(self, drafts: Collection[str]) -> int:
        """One per draft."""
        return len(drafts)

    def add_expert(self, expert: str, like: str) -> Iterator[None]:  # noqa: ARG002
        """See Proposer; an expert of the pool loads its own weights."""
        self.add_client(expert)
        yield

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Refuse: an expert of the pool pulls its own weights.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{slot} pulls its own weights: {len(state)} arrays of version {weight_version}"
        )

    def remove_candidate(self, slot: str) -> None:
        """Do nothing: an expert of the pool empties its own slots."""

    def num_uncomputed(self, request_id: str, draft: str, length: int) -> int:  # noqa: ARG002
        """Return 0: no round waits for an expert's prefill, which runs beside the target."""
        return 0

    def release(self, request_id: str) -> None:
        """Have a sequence's expert release it."""
        expert = self._expert_of.pop(request_id, None)
        if expert is None:
            return
        client = self._clients[expert]
        try:
            client.release(request_id)
        except ConnectionLostError:
            client.disconnect()

    def propose(
        self, rows: Sequence[DraftRow], *, draft_ahead: bool = True, timeout_s: float | None = None
    ) -> Proposal:
        """Draft tokens for every row, as far as the experts respond in time.

        Args:
            rows: see Proposer.
            draft_ahead: whether the experts may draft beyond their responses.
            timeout_s: how long to wait for responses; None: as configured.
        """
        self._poll_clients()
        number = next(self._rounds)
        pending = self._send_requests(number, rows, draft_ahead)
        parts = self._collect(number, pending, self._timeout_s if timeout_s is None else timeout_s)
        if not parts:
            return Proposal.empty(len(rows), self._device)
        return merge(parts, len(rows))

    def _poll_clients(self) -> None:
        """Take new connections, late responses and pongs; ping experts whose backoff is over."""
        with self._connected:
            connections, self._new_connections = self._new_connections, {}
        for expert, (connection, welcome) in connections.items():
            self._clients[expert].connect(connection, welcome)
        now = self._clock()
        for client in self._clients.values():
            if client.connection is None:
                continue
            try:
                client.flush()
                for message in client.receive():
                    if isinstance(message, Pong):
                        client.on_pong(message)
                    elif isinstance(message, DraftResponse):
                        client.late += 1
                if client.circuit.should_ping(now):
                    client.ping()
            except (ConnectionLostError, ProtocolError) as error:
                _disconnect(client, error)

    def _send_requests(
        self, number: int, rows: Sequence[DraftRow], draft_ahead: bool
    ) -> dict[int, _PendingRequest]:
        """Send the round's requests; returns them by their connection's descriptor."""
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            expert = self._expert_of[row.request_id] = expert_of(row.draft)
            groups.setdefault(expert, []).append(index)
        pending = {}
        for expert, indices in groups.items():
            client = self._clients[expert]
            if client.connection is None or not client.circuit.closed:
                continue
            own = [rows[i] for i in indices]
            try:
                client.request(number, own, draft_ahead, self._clock(), self._read_states)
            except ConnectionLostError:
                client.disconnect()
                continue
            pending[client.connection.fileno()] = _PendingRequest(client, indices, own)
        return pending

    def _collect(
        self, number: int, pending: dict[int, _PendingRequest], timeout_s: float
    ) -> list[tuple[list[int], Proposal]]:
        """Wait for the round's responses; open the circuits of experts that miss the deadline."""
        parts = []
        deadline = self._clock() + timeout_s
        with selectors.PollSelector() as selector:
            for descriptor, request in pending.items():
                writing = selectors.EVENT_WRITE if request.client.has_unsent else 0
                selector.register(descriptor, selectors.EVENT_READ | writing, request)
            while selector.get_map():
                left = deadline - self._clock()
                for key, _ in selector.select(max(left, 0.0)):
                    request = key.data
                    done, proposal = self._receive(number, request)
                    if done:
                        selector.unregister(key.fd)
                    elif not request.client.has_unsent:
                        selector.modify(key.fd, selectors.EVENT_READ, request)
                    if proposal is not None:
                        parts.append((request.indices, proposal))
                if left <= 0:  # even if bytes keep coming
                    break
            late = [key.data.client for key in selector.get_map().values()]
        for client in late:
            client.on_timeout(self._clock())
        self.timed_out = bool(late)
        return parts

    def _receive(self, number: int, request: _PendingRequest) -> tuple[bool, Proposal | None]:
        """Read what an expert sent: (whether the request is done, its proposal)."""
        client = request.client
        try:
            client.flush()
            for message in client.receive():
                if isinstance(message, DraftResponse):
                    if not client.is_response(message, number):
                        client.late += 1
                        continue
                    client.on_response(message, request.rows, self._vocab_size, self._clock())
                    return True, self._proposal(message)
        except (ConnectionLostError, ProtocolError) as error:
            _disconnect(client, error)
            return True, None
        return False, None

    def _proposal(self, response: DraftResponse) -> Proposal:
        def tensor(array: Int32 | Float32, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array.copy()).to(self._device, dtype)

        return Proposal(
            token_ids=tensor(response.token_ids, torch.int64),
            num_drafted=tensor(response.num_drafted, torch.int64),
            token_probs=tensor(response.token_probs, torch.float32),
            support_ids=tensor(response.support_ids, torch.int64),
            support_probs=tensor(response.support_probs, torch.float32),
        )


def _disconnect(client: ExpertClient, error: Exception) -> None:
    logger.info("lost the connection to %s: %s", client.name, error)
    client.disconnect()
