"""Statistics of an engine: rounds by topic and draft, and latencies of requests.

The engine's thread alone writes them. Other threads may read at any time; they see each number as
it is now, not all of them as of one round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.actors.engine.request import FAILED, FINISH_NOT_FINITE, GenerationRequest

_MAX_VERSIONS = 3  # per slot: the current one, and those that requests may still draft with
_MAX_LATENCIES = 4096  # kept until drained; the oldest are dropped


@dataclass(slots=True)
class DraftStats:
    """Totals of a draft, named as in vLLM.

    Attributes:
        rounds: of requests that may speculate, with or without draft tokens.
        drafts: rounds with draft tokens.
        draft_tokens: drafted tokens.
        accepted_tokens: accepted draft tokens; recovered and bonus tokens do not count.
        histogram: entry i counts the rounds with drafts and i accepted tokens.
    """

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])

    def add(self, drafted: int, accepted: int) -> None:
        """Count a round of one request."""
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
        """Return the accepted tokens by position in the draft."""
        histogram = list(self.histogram)
        return [sum(histogram[position:]) for position in range(1, len(histogram))]


class RoundStats:
    """Totals of rounds.

    Attributes:
        seconds: of all rounds, without prefill.
        drafting_s: seconds of these spent on drafting.
        plain_s: seconds that plain decoding is expected to take for the same tokens.
        tokens: emitted, those behind the end of an answer included.
        counts: by topic and draft, which is its slot or initial weights (``sql@candidate``).
        versions: by draft and weight_version, for the latest versions of each; only rounds with
            drafts.
    """

    def __init__(self) -> None:
        self.seconds = self.drafting_s = self.plain_s = 0.0
        self.tokens = 0
        self.counts: dict[tuple[str, str], DraftStats] = {}
        self.versions: dict[tuple[str, int], DraftStats] = {}

    def add_row(
        self, topic: str, draft: str, weight_version: int, drafted: int, accepted: int
    ) -> None:
        """Count a round of one request.

        Args:
            topic: of the request.
            draft: its slot or initial weights.
            weight_version: of the draft.
            drafted: draft tokens.
            accepted: of these.
        """
        counts = self.counts.get((topic, draft))
        if counts is None:
            counts = self.counts[topic, draft] = DraftStats()
        counts.add(drafted, accepted)
        if not drafted:
            return
        counts = self.versions.get((draft, weight_version))
        if counts is None:
            counts = self._new_version(draft, weight_version)
        counts.add(drafted, accepted)

    def add_round(
        self, seconds: float, drafting_s: float, tokens: int, plain_s: float | None
    ) -> None:
        """Count the time of a round; ``plain_s`` is None if it is not known."""
        self.seconds += seconds
        self.drafting_s += drafting_s
        self.tokens += tokens
        self.plain_s += plain_s or 0.0

    def _new_version(self, draft: str, weight_version: int) -> DraftStats:
        own = [key for key in self.versions if key[0] == draft]
        for key in own[: max(0, len(own) + 1 - _MAX_VERSIONS)]:
            del self.versions[key]
        counts = self.versions[draft, weight_version] = DraftStats()
        return counts


@dataclass(slots=True)
class _Times:
    """Times of one request, monotonic seconds, and its tokens."""

    topic: str
    arrived_at: float
    resumed: bool
    admitted: bool = False
    first_at: float | None = None
    first_tokens: int = 0
    tokens: int = 0


class RequestStats:
    """Totals of requests, and their latencies in seconds.

    Attributes:
        prompt_tokens: by topic.
        generation_tokens: by topic.
        queue_s: from arrival to admission.
        first_token_s: from arrival to the first token.
        per_token_s: mean time per token after the first chunk, of each request.
        not_finite: requests that failed with NaN or infinite logits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._requests: dict[str, _Times] = {}
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()
        self.queue_s: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self.first_token_s: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self.per_token_s: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self.not_finite = 0

    def on_arrival(self, request: GenerationRequest, at: float) -> None:
        """Note a request that arrived at ``at``.

        The latencies of a resumed one are not counted: when its client sent it is not known here.
        """
        resumed = bool(request.output_token_ids) or request.attempt > 0
        self._requests[request.run_id] = _Times(request.topic, at, resumed)
        if not resumed:
            self.prompt_tokens[request.topic] += len(request.prompt_token_ids)

    def on_admitted(self, run_ids: Iterable[str], at: float) -> None:
        """Note requests that got a row, perhaps not for the first time."""
        for run_id in run_ids:
            times = self._requests.get(run_id)
            if times is None or times.admitted:
                continue
            times.admitted = True
            if not times.resumed:
                self.queue_s.append(max(0.0, at - times.arrived_at))

    def on_output(self, run_id: str, tokens: int, finish_reason: str | None) -> None:
        """Note tokens of a request, or that it finished."""
        times = self._requests.get(run_id)
        if times is None:
            return
        if tokens:
            self.generation_tokens[times.topic] += tokens
            times.tokens += tokens
            if times.first_at is None:
                times.first_at, times.first_tokens = self._clock(), times.tokens
                if not times.resumed:
                    self.first_token_s.append(times.first_at - times.arrived_at)
        if finish_reason is not None:
            self.not_finite += finish_reason == FINISH_NOT_FINITE
            del self._requests[run_id]
            self._finish(times, finish_reason)

    def on_abort(self, run_id: str) -> None:
        """Forget a request if it is known."""
        self._requests.pop(run_id, None)

    def _finish(self, times: _Times, finish_reason: str) -> None:
        further = times.tokens - times.first_tokens
        if times.first_at is not None and further > 0 and finish_reason not in FAILED:
            self.per_token_s.append((self._clock() - times.first_at) / further)


def drain(values: deque[float]) -> tuple[float, ...]:
    """Remove and return the items of a deque that another thread appends to."""
    return tuple(values.popleft() for _ in range(len(values)))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Present state of an engine, and its totals since the start.

    Attributes:
        drafts: weight_version by slot.
        chosen: the controller's current k by draft.
        predicted_goodput: tokens per second that the controller expects of it; None without a
            controller or a choice.
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
    rounds: RoundStats
    requests: RequestStats
