"""What an engine counts: rounds by topic and draft, and how long requests wait. Pure.

Plain numbers that the engine's thread alone writes. Any other thread may read them at any time: a
reader sees each of them as it is now, not all of them as of one round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.actors.engine.request import FAILED, FINISH_NOT_FINITE, GenerationRequest

_VERSIONS = 3  # of a slot: the present one, and those that requests may still draft with
_MOST_WAITING = 4096  # latencies that nobody has taken; the oldest go


@dataclass(slots=True)
class DraftCounts:
    """What a draft did, in vLLM's words.

    Attributes:
        rounds: of a request that may speculate, drafted or not.
        drafts: rounds that drafted.
        draft_tokens: drafted in them.
        accepted_tokens: of these, accepted; recovered and bonus tokens are none of them.
        histogram: rounds with drafts by how many tokens were accepted, from 0.
    """

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])

    def add(self, drafted: int, accepted: int) -> None:
        """Count a request's round."""
        self.rounds += 1
        if not drafted:
            return
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        if drafted >= len(self.histogram):
            self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def accepted_per_position(self) -> list[int]:
        """Accepted tokens by their position in the draft, from 0."""
        histogram = list(self.histogram)
        return [sum(histogram[position:]) for position in range(1, len(histogram))]


class RoundMeter:
    """Rounds since the start.

    Attributes:
        seconds: of all rounds, without the reading of prompts.
        drafting_s: of these, the part that drafting took.
        plain_s: seconds that plain decoding is expected to take for the same tokens.
        tokens: that the rounds emitted, those behind an answer's end included.
        counts: by topic and draft, that is its slot or initial weights (``sql@candidate``).
        versions: by draft and weight_version, of the latest versions of each; of rounds with
            drafts alone.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.seconds = self.drafting_s = self.plain_s = 0.0
        self.tokens = 0
        self.counts: dict[tuple[str, str], DraftCounts] = {}
        self.versions: dict[tuple[str, int], DraftCounts] = {}

    def row(self, topic: str, draft: str, weight_version: int, drafted: int, accepted: int) -> None:
        """Count what a round did for one request.

        Args:
            topic: of the request.
            draft: its slot or initial weights.
            weight_version: that drafted, or would have.
            drafted: tokens.
            accepted: of these.
        """
        counts = self.counts.get((topic, draft))
        if counts is None:
            counts = self.counts[topic, draft] = DraftCounts()
        counts.add(drafted, accepted)
        if not drafted:
            return
        counts = self.versions.get((draft, weight_version))
        if counts is None:
            counts = self._new_version(draft, weight_version)
        counts.add(drafted, accepted)

    def took(self, seconds: float, drafting_s: float, tokens: int, plain_s: float | None) -> None:
        """Count a round's time; ``plain_s`` None: nobody knows what plain decoding costs."""
        self.seconds += seconds
        self.drafting_s += drafting_s
        self.tokens += tokens
        self.plain_s += plain_s or 0.0

    def _new_version(self, draft: str, weight_version: int) -> DraftCounts:
        own = [key for key in self.versions if key[0] == draft]
        for key in own[: max(0, len(own) + 1 - _VERSIONS)]:
            del self.versions[key]
        counts = self.versions[draft, weight_version] = DraftCounts()
        return counts


@dataclass(slots=True)
class _Times:
    """One request's moments, monotonic seconds, and the tokens that it has had."""

    topic: str
    came: float
    resumed: bool
    begun: bool = False
    first: float | None = None
    at_first: int = 0
    tokens: int = 0


class RequestMeter:
    """Tokens by topic, and what requests wait for, in seconds.

    Attributes:
        queue_s: from a request's arrival to its beginning.
        first_token_s: from its arrival to its first token.
        per_token_s: between its tokens after the first, the mean of the request.
        not_finite: requests that failed, their logits being NaN or infinite.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with nobody; ``clock`` gives monotonic seconds."""
        self._clock = clock
        self._requests: dict[str, _Times] = {}
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()
        self.queue_s: deque[float] = deque(maxlen=_MOST_WAITING)
        self.first_token_s: deque[float] = deque(maxlen=_MOST_WAITING)
        self.per_token_s: deque[float] = deque(maxlen=_MOST_WAITING)
        self.not_finite = 0

    def came(self, request: GenerationRequest, at: float) -> None:
        """A request came at ``at`` and is taken in.

        Of one that another replica has begun, nobody here knows how long its client waits.
        """
        resumed = bool(request.output_token_ids) or request.attempt > 0
        self._requests[request.run_id] = _Times(request.topic, at, resumed)
        if not resumed:
            self.prompt_tokens[request.topic] += len(request.prompt_token_ids)

    def begun(self, run_ids: Iterable[str], at: float) -> None:
        """Requests have got a row and memory, perhaps not for the first time."""
        for run_id in run_ids:
            times = self._requests.get(run_id)
            if times is None or times.begun:
                continue
            times.begun = True
            if not times.resumed:
                self.queue_s.append(max(0.0, at - times.came))

    def gave(self, run_id: str, tokens: int, finish_reason: str | None) -> None:
        """A request has had tokens, or has come to its end."""
        times = self._requests.get(run_id)
        if times is None:
            return
        if tokens:
            self.generation_tokens[times.topic] += tokens
            times.tokens += tokens
            if times.first is None:
                times.first, times.at_first = self._clock(), times.tokens
                if not times.resumed:
                    self.first_token_s.append(times.first - times.came)
        if finish_reason is not None:
            self.not_finite += finish_reason == FINISH_NOT_FINITE
            del self._requests[run_id]
            self._end(times, finish_reason)

    def dropped(self, run_id: str) -> None:
        """A request's client has gone; an unknown one is fine."""
        self._requests.pop(run_id, None)

    def _end(self, times: _Times, finish_reason: str) -> None:
        further = times.tokens - times.at_first
        if times.first is not None and further > 0 and finish_reason not in FAILED:
            self.per_token_s.append((self._clock() - times.first) / further)


def drained(values: deque[float]) -> tuple[float, ...]:
    """What lies in a deque that another thread goes on filling, taken out."""
    return tuple(values.popleft() for _ in range(len(values)))


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What an engine is at and what it has done since its start.

    ``drafts`` are slots with their weight_version; ``chosen`` the controller's present k of the
    drafts that were asked for, ``predicted_goodput`` the tokens per second that it expects of it,
    None where there is no controller or no choice yet.
    """

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_available: int
    preemptions: int
    draft_failures: int
    drafts: Mapping[str, int]
    chosen: Mapping[str, int]
    predicted_goodput: float | None
    rounds: RoundMeter
    requests: RequestMeter
