"""The target's proposer over experts in processes of their own."""

from __future__ import annotations

import itertools
import logging
import selectors
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.actors.speculation.colocated import merge
from paceline.actors.speculation.costs import Reads
from paceline.actors.speculation.pool.connection import ChannelError, ExpertLink
from paceline.actors.speculation.pool.messages import Answer, Ask, Float32, Int32, Pong, WireError
from paceline.actors.speculation.pool.peer import Peer
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import expert_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question of the present round: the rows' places in the batch."""

    peer: Peer
    indices: list[int]
    rows: list[DraftRow]


class PoolProposer:
    """Asks every expert of a round at once and waits for their answers, but not for long.

    Rows of an expert that is dead, silent or slow draft nothing; its circuit then keeps rounds
    from waiting for it until it answers again. :meth:`add`, :meth:`attach`, :meth:`wants_link`
    and :meth:`describe` may be called from any thread, everything else from the engine's alone.
    """

    hidden_drafts: frozenset[str] = frozenset()

    def __init__(
        self,
        experts: Sequence[str],
        *,
        device: torch.device,
        vocab_size: int,
        round_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin without connections: until there are some, nothing is drafted.

        Args:
            experts: their names; each also serves its initial weights (``sql@0``).
            device: where proposals are to be.
            vocab_size: of the target; an answer with other tokens breaks its connection.
            round_timeout_s: how long a round waits for answers.
            clock: seconds, monotonic.
        """
        self._peers = {name: Peer(name) for name in experts}
        self._device = device
        self._vocab_size = vocab_size
        self._timeout_s = round_timeout_s
        self._clock = clock
        self._rounds = itertools.count(1)
        self._expert_of: dict[str, str] = {}
        self._attached = threading.Condition()
        self._links: dict[str, ExpertLink] = {}  # not taken yet; guarded by the condition
        self.waited_in_vain = False
        self.reads = Reads()  # experts read while the target works
        self.faulty: frozenset[str] = frozenset()  # an expert sees to that itself

    def add(self, expert: str) -> None:
        """Ask a further expert too, once it has a connection; one that is known is fine."""
        if expert not in self._peers:  # a new dictionary: the rounds may be reading the old one
            self._peers = {**self._peers, expert: Peer(expert)}

    def attach(self, expert: str, link: ExpertLink) -> None:
        """Use a connection from the next round on, in place of an earlier one."""
        with self._attached:
            replaced = self._links.pop(expert, None)
            self._links[expert] = link
            self._peers[expert].wanting = False
            self._attached.notify_all()
        if replaced is not None:
            replaced.close()

    def wants_link(self, expert: str) -> bool:
        """True where an expert has no connection, or has lost it."""
        return self._peers[expert].wanting

    def wait_for_links(self, timeout_s: float) -> list[str]:
        """Wait until every expert has a connection; returns those that have one by then."""
        with self._attached:
            self._attached.wait_for(
                lambda: not any(peer.wanting for peer in self._peers.values()), timeout_s
            )
        return [name for name, peer in self._peers.items() if not peer.wanting]

    def describe(self) -> dict[str, dict[str, Any]]:
        """State and counts of every expert's circuit, for people."""
        return {name: peer.describe() for name, peer in self._peers.items()}

    def drafts(self) -> dict[str, int]:
        """Every draft with the weight_version of its expert's latest answer."""
        known = {name + suffix: 0 for name in self._peers for suffix in ("", INITIAL_SUFFIX)}
        for name, peer in self._peers.items():
            known |= {d: v for d, v in peer.weight_versions.items() if expert_of(d) == name}
        return known

    def version(self, draft: str) -> int:
        """The weight_version with which a draft last proposed: without a candidate the stable."""
        expert = expert_of(draft)
        versions = self._peers[expert].weight_versions
        return versions.get(draft if draft in versions else expert, 0)

    def add_expert(self, expert: str, like: str) -> Iterator[None]:  # noqa: ARG002
        """See Proposer; in the pool an expert loads its own weights."""
        self.add(expert)
        yield

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Refuse: in the pool an expert loads its own weights.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{slot} pulls its own weights: {len(state)} arrays of version {weight_version}"
        )

    def remove_candidate(self, slot: str) -> None:
        """Nothing to do: an expert empties its own slots."""

    def lacks(self, request_id: str, draft: str, length: int) -> int:  # noqa: ARG002
        """Nothing that a round waits for: an expert reads while the target works."""
        return 0

    def release(self, request_id: str) -> None:
        """Tell the expert that a sequence has ended."""
        expert = self._expert_of.pop(request_id, None)
        if expert is None:
            return
        peer = self._peers[expert]
        try:
            peer.release(request_id)
        except ChannelError:
            peer.lose()

    def propose(
        self, rows: Sequence[DraftRow], *, ahead: bool = True, timeout_s: float | None = None
    ) -> Proposal:
        """Draft tokens for every row, as far as the experts answer in time.

        Args:
            rows: see Proposer.
            ahead: whether the experts may draft beyond their answers.
            timeout_s: how long to wait for answers; None: what was set.
        """
        self._look()
        number = next(self._rounds)
        asked = self._ask(number, rows, ahead)
        parts = self._gather(number, asked, self._timeout_s if timeout_s is None else timeout_s)
        if not parts:
            return Proposal.empty(len(rows), self._device)
        return merge(parts, len(rows))

    def _look(self) -> None:
        """Take new connections, late frames and pongs; ping those that may be back."""
        with self._attached:
            links, self._links = self._links, {}
        for expert, link in links.items():
            self._peers[expert].take(link)
        now = self._clock()
        for peer in self._peers.values():
            if peer.link is None:
                continue
            try:
                peer.flush()
                for message in peer.receive():
                    if isinstance(message, Pong):
                        peer.pong(message)
                    elif isinstance(message, Answer):
                        peer.late += 1
                if peer.circuit.due(now):
                    peer.ping()
            except (ChannelError, WireError) as error:
                logger.info("the connection to %s is lost: %s", peer.name, error)
                peer.lose()

    def _ask(self, number: int, rows: Sequence[DraftRow], ahead: bool) -> dict[int, _Asked]:
        """Send the round's questions; returns them by their link's descriptor."""
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            expert = self._expert_of[row.request_id] = expert_of(row.draft)
            groups.setdefault(expert, []).append(index)
        asked = {}
        for expert, indices in groups.items():
            peer = self._peers[expert]
            if peer.link is None or not peer.circuit.closed:
                continue
            mine = [rows[i] for i in indices]
            try:
                peer.ask(Ask(number, peer.rows(mine), ahead), self._clock())
            except ChannelError:
                peer.lose()
                continue
            asked[peer.link.fileno()] = _Asked(peer, indices, mine)
        return asked

    def _gather(
        self, number: int, asked: dict[int, _Asked], timeout_s: float
    ) -> list[tuple[list[int], Proposal]]:
        """Answers of this round that come in time; the others' circuits open."""
        parts = []
        deadline = self._clock() + timeout_s
        with selectors.PollSelector() as selector:
            for descriptor, question in asked.items():
                writing = selectors.EVENT_WRITE if question.peer.sending else 0
                selector.register(descriptor, selectors.EVENT_READ | writing, question)
            while selector.get_map():
                left = deadline - self._clock()
                for key, _ in selector.select(max(left, 0.0)):
                    question = key.data
                    done, answer = self._read(number, question)
                    if done:
                        selector.unregister(key.fd)
                    elif not question.peer.sending:
                        selector.modify(key.fd, selectors.EVENT_READ, question)
                    if answer is not None:
                        parts.append((question.indices, answer))
                if left <= 0:  # even where bytes go on coming, one by one
                    break
            silent = [key.data.peer for key in selector.get_map().values()]
        for peer in silent:
            peer.silent(self._clock())
        self.waited_in_vain = bool(silent)
        return parts

    def _read(self, number: int, asked: _Asked) -> tuple[bool, Proposal | None]:
        """What an expert has said: (no more to wait for, its proposal)."""
        peer = asked.peer
        try:
            peer.flush()
            for message in peer.receive():
                if isinstance(message, Answer):
                    if not peer.answers(message, number):
                        peer.late += 1
                        continue
                    peer.accept(message, asked.rows, self._vocab_size, self._clock())
                    return True, self._proposal(message)
        except (ChannelError, WireError) as error:
            logger.info("the connection to %s is lost: %s", peer.name, error)
            peer.lose()
            return True, None
        return False, None

    def _proposal(self, answer: Answer) -> Proposal:
        def tensor(array: Int32 | Float32, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array.copy()).to(self._device, dtype)

        return Proposal(
            token_ids=tensor(answer.token_ids, torch.int64),
            num_drafted=tensor(answer.num_drafted, torch.int64),
            token_probs=tensor(answer.token_probs, torch.float32),
            support_ids=tensor(answer.support_ids, torch.int64),
            support_probs=tensor(answer.support_probs, torch.float32),
        )
