"""Statistics of an engine: rounds by topic and draft, and latencies of requests.

The engine's thread alone writes them. Other threads may read at any time; they see each number as
it is now, not all of them as of one round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paceline.actors.engine.request import FAILED, FINISH_ABORT, GenerationRequest

_MAX_VERSIONS = 3  # per slot: the current one, and those that requests may still draft with
_MAX_RECENT = 4096  # kept until drained; the oldest are dropped
# Upper bounds of histograms.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))


class Histogram:
    """Values by bucket since the start.

    Attributes:
        bounds: upper bounds of the buckets, increasing; values above them are in one more.
        counts: values per bucket, ``len(bounds) + 1``.
        sum: of all values.
        recent: values that were not drained yet; the oldest are dropped.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=_MAX_RECENT)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.recent.append(value)


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
        seconds: of all rounds that computed no prompts.
        drafting_s: seconds of these spent on drafting.
        plain_s: seconds that plain decoding is expected to take for the same tokens.
        tokens: emitted in these rounds, those behind the end of an answer included.
        counts: by topic and draft, which is its slot or initial weights (``sql@candidate``).
        versions: by draft and weight_version, for the latest versions of each; only rounds with
            drafts.
        suffixes: by topic, (drafted, accepted) tokens of suffix drafts, which are in no other.
    """

    def __init__(self) -> None:
        self.seconds = self.drafting_s = self.plain_s = 0.0
        self.tokens = 0
        self.counts: dict[tuple[str, str], DraftStats] = {}
        self.versions: dict[tuple[str, int], DraftStats] = {}
        self.suffixes: dict[str, tuple[int, int]] = {}

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

    def add_suffix(self, topic: str, drafted: int, accepted: int) -> None:
        """Count a suffix draft of one request."""
        before = self.suffixes.get(topic, (0, 0))
        self.suffixes[topic] = before[0] + drafted, before[1] + accepted

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
    last_at: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0


class RequestStats:
    """Totals of requests, and their latencies in seconds.

    Attributes:
        prompt_tokens: by topic.
        generation_tokens: by topic.
        queue_s: from arrival to admission.
        first_token_s: from arrival to the first token.
        inter_token_s: between two rounds that gave tokens to a request.
        per_token_s: mean time per token after the first round, of each request.
        e2e_s: from arrival to the end, of requests that did not fail.
        prompt_lengths: tokens of their prompts.
        output_lengths: tokens of their answers.
        finished: requests by finish reason.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._requests: dict[str, _Times] = {}
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()
        self.queue_s, self.first_token_s = Histogram(LONG_S), Histogram(LONG_S)
        self.inter_token_s, self.per_token_s = Histogram(SHORT_S), Histogram(SHORT_S)
        self.e2e_s = Histogram(LONG_S)
        self.prompt_lengths, self.output_lengths = Histogram(TOKENS), Histogram(TOKENS)
        self.finished: Counter[str] = Counter()

    def on_arrival(self, request: GenerationRequest, at: float) -> None:
        """Note a request that arrived at ``at``.

        The latencies of a resumed one are not counted: when its client sent it is not known here.
        """
        resumed = bool(request.output_token_ids) or request.attempt > 0
        tokens = len(request.prompt_token_ids)
        self._requests[request.run_id] = _Times(request.topic, at, resumed, prompt_tokens=tokens)
        if not resumed:
            self.prompt_tokens[request.topic] += tokens

    def on_admitted(self, run_ids: Iterable[str], at: float) -> None:
        """Note requests that got a row, perhaps not for the first time."""
        for run_id in run_ids:
            times = self._requests.get(run_id)
            if times is None or times.admitted:
                continue
            times.admitted = True
            if not times.resumed:
                self.queue_s.observe(max(0.0, at - times.arrived_at))

    def on_output(self, run_id: str, tokens: int, finish_reason: str | None) -> None:
        """Note tokens of a request, or that it finished."""
        times = self._requests.get(run_id)
        if times is None:
            return
        now = self._clock()
        if tokens:
            self.generation_tokens[times.topic] += tokens
            times.tokens += tokens
            if times.first_at is None:
                times.first_at, times.first_tokens = now, times.tokens
                if not times.resumed:
                    self.first_token_s.observe(now - times.arrived_at)
            else:
                self.inter_token_s.observe(now - times.last_at)
            times.last_at = now
        if finish_reason is not None:
            self.finished[finish_reason] += 1
            del self._requests[run_id]
            if finish_reason not in FAILED:
                self._finish(times, now)

    def on_abort(self, run_id: str) -> None:
        """Forget a request if it is known."""
        self.finished[FINISH_ABORT] += self._requests.pop(run_id, None) is not None

    def _finish(self, times: _Times, now: float) -> None:
        further = times.tokens - times.first_tokens
        if times.first_at is not None and further > 0:
            self.per_token_s.observe((now - times.first_at) / further)
        if not times.resumed:
            self.e2e_s.observe(now - times.arrived_at)
            self.prompt_lengths.observe(times.prompt_tokens)
            self.output_lengths.observe(times.tokens)


def drain(values: deque[float]) -> tuple[float, ...]:
    """Remove and return the items of a deque that another thread appends to."""
    return tuple(values.popleft() for _ in range(len(values)))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Present state of an engine, and its totals since the start.

    Attributes:
        prefix_cache: prompt tokens that were looked up in the prefix cache, and found.
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
    prefix_cache: tuple[int, int]
    draft_failures: int
    drafts: Mapping[str, int]
    chosen: Mapping[str, int]
    predicted_goodput: float | None
    rounds: RoundStats
    requests: RequestStats
