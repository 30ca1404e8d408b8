"""Costs of rounds: step and prefill times, profiled at start and corrected by measurements."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_SMOOTHING = 0.1
_OUTLIER = 1.5
_REQUESTS_WINDOW = 64.0  # requests
_MIN_FILLED = 0.5  # of the length that prefills of one forward are padded to
_MIN_RATIO = 0.1  # to the profile: noise must not bring a cost to nothing
_TRUSTED_AFTER = 3
_FORGOTTEN_AFTER = 500
# Of the excess of a settled size over its expected time, the machine's pace takes most at once: it
# changes from one second to the next and concerns all sizes, the cost of a size itself does not.
_PACE_SMOOTHING, _SETTLED_SMOOTHING = 0.1, 0.02
_SETTLED_AFTER = 20
_MAX_PACE = 1e3  # a clock that stands still must not bring the pace to nothing
_ROUNDS_WINDOW = 200.0
# Observations that the profile counts as: many for the cost of a step, next to none for the fixed
# cost of a round, of which the profile says nothing.
_SLOPE_PRIOR, _FIXED_PRIOR = 20.0, 0.01
_MIN_SLOPE = 0.2


class DraftPrefill(NamedTuple):
    """Prompt tokens that drafts have read, or have to read.

    Attributes:
        requests: number of requests.
        tokens: of all of them together.
    """

    requests: int = 0
    tokens: int = 0


def batch_prefills(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group prefills into forwards, in which all are padded to the longest.

    A forward costs a draft about as much as a hundred tokens, so short prefills go together; but
    none goes with one so much longer that the padding would cost more.

    Args:
        lengths: tokens of each prefill.
        max_tokens: of a forward, padding included; a longer prefill goes alone.

    Returns:
        indices into ``lengths``, every one once, the longest first.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if room > 0 and lengths[index] >= _MIN_FILLED * longest:
            batches[-1].append(index)
        else:
            longest = lengths[index]
            batches.append([index])
            room = max_tokens // max(longest, 1)
        room -= 1
    return batches


class PrefillCosts:
    """Seconds of draft prefill, spread over the tokens that requests emit. Pure.

    A draft computes keys and values of prompt and output before its first proposal. For a long
    prompt with a short answer, or an answer that soon ends, that may cost more than the rest of
    the answer can win back.
    """

    def __init__(self, request_s: float = 0.0, token_s: float = 0.0) -> None:
        """Start with a profile.

        Args:
            request_s: fixed seconds per request; both are 0 if drafts prefill while the target
                works, at no cost to the round.
            token_s: seconds per token.
        """
        self._profiled = request_s, token_s
        self._ratio = 1.0
        # Starts as one request with a prompt as long as its answer.
        self._requests = 1.0
        self._prompts = self._outputs = 32.0

    def seconds(self, requests: float, tokens: float) -> float:
        """Expected seconds of a prefill."""
        request_s, token_s = self._profiled
        return self._ratio * (request_s * requests + token_s * tokens)

    def observe(self, prefill: DraftPrefill, seconds: float) -> None:
        """Take the time of a prefill; a stall counts no more than an outlier."""
        expected = self.seconds(*prefill)
        if expected > 0.0:
            times = min(max(seconds, 0.0) / expected, _OUTLIER)
            self._ratio = max(self._ratio * (1.0 + _SMOOTHING * (times - 1.0)), _MIN_RATIO)

    def observe_finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take the lengths of a finished request."""
        keep = 1.0 - 1.0 / _REQUESTS_WINDOW
        self._requests = keep * self._requests + 1.0
        self._prompts = keep * self._prompts + prompt_tokens
        self._outputs = keep * self._outputs + output_tokens

    @property
    def seconds_per_output_token(self) -> float:
        """Prefill seconds per emitted token, for requests of the usual lengths."""
        return self.seconds(self._requests, self._prompts) / max(self._outputs, 1.0)

    @property
    def seconds_per_request(self) -> float:
        """Prefill seconds of a request with a prompt of the usual length."""
        return self.seconds(1.0, self._prompts / self._requests)

    def expected_remaining(self, output_tokens: int, limit: int) -> float:
        """Tokens that a request is expected to emit yet, at least 1.

        Args:
            output_tokens: emitted so far.
            limit: of the request.
        """
        usual = self._outputs / self._requests
        return max(min(limit - output_tokens, max(usual - output_tokens, usual / 4)), 1.0)


@dataclass(slots=True)
class _Measurement:
    """Smoothed seconds of one size.

    Attributes:
        seconds: at pace 1, for sizes that have a pace.
        count: number of measurements.
        at: number of observations of any size up to the last one of this size.
    """

    seconds: float
    count: int
    at: int

    def trusted(self, now: int) -> bool:
        """Whether it was measured often and lately; ``now`` counts observations of any size."""
        return self.count >= _TRUSTED_AFTER and now - self.at <= _FORGOTTEN_AFTER

    def update(self, seconds: float, now: int, smoothing: float = _SMOOTHING) -> None:
        """Take a further measurement; the older the last one, the less weight it keeps."""
        age = min((now - self.at) * _SMOOTHING, 5.0)
        share = max(1.0 - (1.0 - smoothing) ** max(age, 1.0), 1.0 / (self.count + 1))
        self.seconds += share * (seconds - self.seconds)
        self.count, self.at = self.count + 1, now


@dataclass(slots=True)
class _LinearFit:
    """Decayed least squares of seconds by profiled seconds: ``fixed + slope * profiled``.

    Attributes:
        factor_share: of what exceeds the profile, so much is taken for a factor, the rest for a
            fixed cost, until times of different sizes tell.
    """

    factor_share: float = 0.0
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    fixed: float = 0.0
    slope: float = 1.0

    def seconds(self, profiled: float) -> float:
        return self.fixed + self.slope * profiled

    def observe(self, profiled: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / _ROUNDS_WINDOW
        self.n = keep * self.n + 1.0
        self.x = keep * self.x + profiled
        self.xx = keep * self.xx + profiled * profiled
        self.y = keep * self.y + seconds
        self.xy = keep * self.xy + profiled * seconds
        prior, ratio = _SLOPE_PRIOR * self.xx / self.n, self.y / self.x
        slope = 1.0 + self.factor_share * (ratio - 1.0)
        n, xx, xy = self.n + _FIXED_PRIOR, self.xx + prior, self.xy + slope * prior
        determinant = n * xx - self.x * self.x
        self.fixed = (self.y * xx - self.x * xy) / determinant
        self.slope = (n * xy - self.x * self.y) / determinant
        if self.fixed < 0.0:  # the profile is of a slower time, which the prior must not prolong
            self.fixed, self.slope = 0.0, ratio
        self.slope = max(self.slope, _MIN_SLOPE)


class StepCosts:
    """Seconds of a step by two sizes (batch rows, and a column: tokens or experts).

    The first time of a size counts as no more than expected: it includes one-time work, above all
    the generation of code for products of that size.

    A size that was measured often and lately has its own smoothed time, times the machine's pace,
    which is learnt from all such sizes, so that rarely measured ones keep up with the others. Any
    other size is interpolated from the profile, which is of forwards alone in a fast moment: a fit
    adds what every round takes beside its forward, and scales the rest. As a mere factor that
    would make each drafted token look dearer, and what is not drafted is not measured.
    """

    def __init__(self, profile: Mapping[tuple[int, int], float]) -> None:
        """Start from a full grid of positive seconds, ``{(a, b): seconds}``."""
        self._rows = sorted({rows for rows, _ in profile})
        self._columns = sorted({column for _, column in profile})
        self._profile = dict(profile)
        self._interpolated: dict[tuple[int, int], float] = {}  # cache
        self._measured: dict[tuple[int, int], _Measurement] = {}
        self._fit = _LinearFit(factor_share=0.5)
        self._pace = 1.0
        self._observed = 0

    @property
    def pace(self) -> float:
        """Present slowness of the machine, over sizes that run often; 1 at first."""
        return self._pace

    def measured_within(self, rows: int, column: int, observations: int) -> bool:
        """Whether a size was among so many latest observations."""
        known = self._measured.get((rows, column))
        return known is not None and self._observed - known.at < observations

    def seconds(self, rows: int, column: int) -> float:
        """Expected seconds of a step."""
        known = self._measured.get((rows, column))
        if known is not None and known.trusted(self._observed):
            return known.seconds * self._pace
        return self._pace * self._fit.seconds(self.profiled(rows, column))

    def seconds_between(self, rows: int, column: float) -> float:
        """Expected seconds of a step with a mean second size."""
        low = int(column)
        at_low = self.seconds(rows, low)
        if column == low:
            return at_low
        return at_low + (column - low) * (self.seconds(rows, low + 1) - at_low)

    def observe(self, rows: int, column: int, seconds: float) -> None:
        """Take the time of a step; a single stall does not move the estimate far."""
        expected = self.seconds(rows, column)
        bound = _OUTLIER if (rows, column) in self._measured else 1.0
        seconds = min(seconds, bound * expected)
        self._observed += 1
        first = _Measurement(seconds / self._pace, 0, self._observed)
        known = self._measured.setdefault((rows, column), first)
        settled = known.count >= _SETTLED_AFTER and known.trusted(self._observed)
        smoothing = _SETTLED_SMOOTHING if settled else _SMOOTHING
        known.update(seconds / self._pace, self._observed, smoothing)
        if settled:
            moved = self._pace * (1.0 + _PACE_SMOOTHING * (seconds / expected - 1.0))
            self._pace = min(max(moved, 1.0 / _MAX_PACE), _MAX_PACE)
        if rows <= self._rows[-1] and column <= self._columns[-1]:
            self._fit.observe(self.profiled(rows, column), seconds / self._pace)

    def profiled(self, rows: int, column: int) -> float:
        """Seconds of a step in the profile, interpolated."""
        known = self._interpolated.get((rows, column))
        if known is None:
            low, high, weight = _between(self._rows, rows)
            at_low, at_high = (self._at_rows(at, column) for at in (low, high))
            known = self._interpolated[rows, column] = _interpolate(at_low, at_high, weight)
        return known

    def _at_rows(self, rows: int, column: int) -> float:
        low, high, weight = _between(self._columns, column)
        return _interpolate(self._profile[rows, low], self._profile[rows, high], weight)


def _interpolate(low: float, high: float, weight: float) -> float:
    """Interpolate two profiled times; extrapolation never goes below the second."""
    return (
        low + weight * (high - low)
        if weight <= 1.0
        else high + (weight - 1.0) * max(high - low, 0.0)
    )


def _between(points: Sequence[int], value: int) -> tuple[int, int, float]:
    """Neighbouring grid points, and the weight of the second; above 1 beyond the grid."""
    if len(points) == 1 or value <= points[0]:
        return points[0], points[0], 0.0
    at = min(bisect.bisect_left(points, value), len(points) - 1)
    low, high = points[at - 1], points[at]
    return low, high, (value - low) / (high - low)


def profile(
    run: Callable[[int, int], None],
    rows: Sequence[int],
    columns: Sequence[int],
    clock: Callable[[], float],
    repeats: int = 3,
    enough_s: float = math.inf,
) -> dict[tuple[int, int], float]:
    """Best of several timings of ``run(rows, column)`` over a grid, in seconds.

    All sizes in turns, so that a slow moment of the machine makes none of them look dear, and none
    is taken to cost more than a larger one. After a first turn, which warms up, and a second, none
    begins once all have taken ``enough_s``: a stall is a small part of what takes so long.
    """
    times = {(size, column): float("inf") for size in rows for column in columns}
    began = clock()
    for turn in range(repeats + 1):
        if turn > 1 and clock() - began >= enough_s:
            break
        for size, column in times:
            start = clock()
            run(size, column)
            times[size, column] = min(times[size, column], clock() - start)

    def least(size: int, column: int) -> float:
        return min(s for at, s in times.items() if at[0] >= size and at[1] >= column)

    return {at: max(least(*at), 1e-7) for at in times}


def grid_points(largest: int) -> list[int]:
    """1, 2, 4, ... up to and with ``largest``."""
    points = []
    size = 1
    while size < largest:
        points.append(size)
        size *= 2
    return [*points, largest]


_NO_PREFILL = DraftPrefill()


class DraftCosts:
    """Seconds of a round's drafting by rows, experts and steps.

    A fit separates the fixed cost of a round from the cost of its steps: if it were charged to
    every step, long drafts would look dear for ever after short ones.
    """

    def __init__(
        self, profile: Mapping[tuple[int, int], float], prefill_costs: PrefillCosts | None = None
    ) -> None:
        """Start from a profile.

        Args:
            profile: seconds of one step, a full grid ``{(rows, experts): seconds}``.
            prefill_costs: of drafts; None if prefill costs the round nothing.
        """
        self._steps = StepCosts(profile)
        self._fit = _LinearFit()
        self._measured: dict[tuple[int, int, int], _Measurement] = {}
        self._observed = 0
        self.prefill_costs = prefill_costs or PrefillCosts()

    def seconds(self, rows: int, experts: int, steps: int) -> float:
        """Expected seconds of drafting ``steps`` tokens for ``rows`` rows; none for 0 steps."""
        if not steps:
            return 0.0
        known = self._measured.get((rows, experts, steps))
        if known is not None and known.trusted(self._observed):
            return known.seconds
        return self._fit.seconds(steps * self._steps.profiled(rows, experts))

    def observe(
        self,
        rows: int,
        experts: int,
        steps: int,
        seconds: float,
        prefilled: DraftPrefill = _NO_PREFILL,
    ) -> None:
        """Take a round's drafting time.

        Args:
            rows: that drafted.
            experts: of these rows.
            steps: 0 if nothing was drafted.
            seconds: of drafting and prefill.
            prefilled: what was prefilled; if there is any, only the prefill's cost is updated.
        """
        expected = self.seconds(rows, experts, steps)
        if prefilled.tokens:
            self.prefill_costs.observe(prefilled, seconds - expected)
        elif steps:
            size = rows, experts, steps
            seconds = min(seconds, (_OUTLIER if size in self._measured else 1.0) * expected)
            self._observed += 1
            first = _Measurement(seconds, 0, self._observed)
            self._measured.setdefault(size, first).update(seconds, self._observed)
            self._fit.observe(steps * self._steps.profiled(rows, experts), seconds)
