"""What rounds cost: step times, profiled at the start and corrected by what is measured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_SMOOTHING = 0.1
_REQUESTS_WINDOW = 64.0  # requests
_OUTLIER = 1.5
_LEAST_FILLED = 0.5  # of what stretches are padded to
_LEAST_RATIO = 0.1  # to the profile: what is mostly noise must not end at nothing


class Reads(NamedTuple):
    """What a draft has read, or has to read.

    Attributes:
        requests: of which it is.
        tokens: all of them.
    """

    requests: int = 0
    tokens: int = 0


def read_together(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Which stretches to read in one forward, where all are padded to the longest of it.

    A forward costs a draft about as much as a hundred tokens, so short stretches go together; but
    none goes with one so much longer that what pads it would cost more.

    Args:
        lengths: tokens of each stretch.
        most: tokens of a forward, padding included; a longer stretch goes alone.

    Returns:
        indices into ``lengths``, every one once, the longest first.
    """
    parts: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[parts[-1][0]] if parts else 0
        if room > 0 and lengths[index] >= _LEAST_FILLED * longest:
            parts[-1].append(index)
        else:
            longest = lengths[index]
            parts.append([index])
            room = most // max(longest, 1)
        room -= 1
    return parts


class ReadingCosts:
    """Seconds of a draft's reading, spread over the tokens that its requests emit. Pure.

    A draft computes keys and values for all that a request has, prompt and output, before its first
    proposal. For a long prompt with a short answer, or an answer that soon ends, that may be more
    than the rest of the answer can win back.
    """

    def __init__(self, request_s: float = 0.0, token_s: float = 0.0) -> None:
        """Start with what a profile says.

        Args:
            request_s: seconds of a request beside its tokens; 0, like the other, where reading
                is done while the target works and costs the round nothing.
            token_s: seconds of each token.
        """
        self._profiled = request_s, token_s
        self._ratio = 1.0
        # One request whose prompt is as long as its answer, until others are known.
        self._requests = 1.0
        self._prompts = self._outputs = 32.0

    def seconds(self, requests: float, tokens: float) -> float:
        """Seconds of reading so much."""
        request_s, token_s = self._profiled
        return self._ratio * (request_s * requests + token_s * tokens)

    def read(self, reads: Reads, seconds: float) -> None:
        """Take what some reading took; a stall does not count as such."""
        expected = self.seconds(*reads)
        if expected > 0.0:
            times = min(max(seconds, 0.0) / expected, _OUTLIER)
            self._ratio = max(self._ratio * (1.0 + _SMOOTHING * (times - 1.0)), _LEAST_RATIO)

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take a finished request's lengths."""
        keep = 1.0 - 1.0 / _REQUESTS_WINDOW
        self._requests = keep * self._requests + 1.0
        self._prompts = keep * self._prompts + prompt_tokens
        self._outputs = keep * self._outputs + output_tokens

    @property
    def usual_s(self) -> float:
        """Seconds of reading for each token that requests emit, as they usually are."""
        return self.seconds(self._requests, self._prompts) / max(self._outputs, 1.0)

    @property
    def request_s(self) -> float:
        """Seconds of reading for a request, as they usually are."""
        return self.seconds(1.0, self._prompts / self._requests)

    def left(self, output_tokens: int, limit: int) -> float:
        """Tokens that a request is expected to emit yet, at least 1.

        Args:
            output_tokens: that it has emitted.
            limit: of the request.
        """
        usual = self._outputs / self._requests
        return max(min(limit - output_tokens, max(usual - output_tokens, usual / 4)), 1.0)


OUTLIER = 1.5
_TRUSTED_AFTER = 3
_FORGOTTEN_AFTER = 500
# Of what a settled size takes longer than expected, the machine's pace gets most at once: it
# changes from one second to the next and concerns all sizes, what a size itself takes does not.
_PACE, _OWN = 0.1, 0.02
_SETTLED_AFTER = 20
_FAR = 1e3  # no machine's pace goes beyond; a clock that stands still must not bring it to nothing


@dataclass(slots=True)
class Measured:
    """Smoothed seconds of one size.

    Attributes:
        seconds: that it takes, at the pace 1 where there is one.
        count: how often it was measured.
        at: observations of any size until the last one of this.
    """

    seconds: float
    count: int
    at: int

    def trusted(self, now: int) -> bool:
        """Whether it was measured often and lately; ``now`` counts observations of any size."""
        return self.count >= _TRUSTED_AFTER and now - self.at <= _FORGOTTEN_AFTER

    def take(self, seconds: float, now: int, smoothing: float = _SMOOTHING) -> None:
        """A further measurement; the longer ago the last one, the less that one says."""
        age = min((now - self.at) * _SMOOTHING, 5.0)
        share = max(1.0 - (1.0 - smoothing) ** max(age, 1.0), 1.0 / (self.count + 1))
        self.seconds += share * (seconds - self.seconds)
        self.count, self.at = self.count + 1, now


class StepCosts:
    """Seconds of a step by two sizes (batch rows, and tokens or experts).

    The first time of a size counts as no more than was expected: it holds what is done once, the
    making of code for products of that size above all.

    A size that was measured often and lately has its own smoothed time, times the machine's pace:
    that is learnt from all such sizes, so that one which is looked at now and then keeps up with
    those that run all the time. Any other is interpolated from the profile and scaled by how the
    latest measured ones compare to it: neither what was never tried nor what was last seen on a
    slower machine must look cheap or dear.
    """

    def __init__(self, profile: Mapping[tuple[int, int], float]) -> None:
        """Start from a full grid of positive seconds, ``{(a, b): seconds}``."""
        self._rows = sorted({rows for rows, _ in profile})
        self._columns = sorted({column for _, column in profile})
        self._profile = dict(profile)
        self._lines: dict[tuple[int, int], float] = {}  # interpolated once
        self._measured: dict[tuple[int, int], Measured] = {}
        self._ratio = self._pace = 1.0
        self._observed = 0

    @property
    def pace(self) -> float:
        """How much slower than before the machine is now, over sizes that run often; 1 at first."""
        return self._pace

    def seconds(self, rows: int, column: int) -> float:
        """The expected time of a step."""
        known = self._measured.get((rows, column))
        if known is not None and known.trusted(self._observed):
            return known.seconds * self._pace
        return self.profiled(rows, column) * self._ratio

    def observe(self, rows: int, column: int, seconds: float) -> None:
        """Take a measured time; a single stall does not move the estimate far."""
        expected = self.seconds(rows, column)
        bound = OUTLIER if (rows, column) in self._measured else 1.0
        seconds = min(seconds, bound * expected)
        self._observed += 1
        first = Measured(seconds / self._pace, 0, self._observed)
        known = self._measured.setdefault((rows, column), first)
        settled = known.count >= _SETTLED_AFTER and known.trusted(self._observed)
        known.take(seconds / self._pace, self._observed, _OWN if settled else _SMOOTHING)
        if settled:
            moved = self._pace * (1.0 + _PACE * (seconds / expected - 1.0))
            self._pace = min(max(moved, 1.0 / _FAR), _FAR)
        if rows <= self._rows[-1] and column <= self._columns[-1]:
            ratio = seconds / self.profiled(rows, column)
            self._ratio += _SMOOTHING * (ratio - self._ratio)

    def profiled(self, rows: int, column: int) -> float:
        """The profile's time of a step, interpolated, nothing measured since."""
        known = self._lines.get((rows, column))
        if known is None:
            low, high, weight = _between(self._rows, rows)
            at_low, at_high = (self._along(at, column) for at in (low, high))
            known = self._lines[rows, column] = _line(at_low, at_high, weight)
        return known

    def _along(self, rows: int, column: int) -> float:
        low, high, weight = _between(self._columns, column)
        return _line(self._profile[rows, low], self._profile[rows, high], weight)


def _line(low: float, high: float, weight: float) -> float:
    """Between two profiled times, and beyond the second never below it."""
    return (
        low + weight * (high - low)
        if weight <= 1.0
        else high + (weight - 1.0) * max(high - low, 0.0)
    )


def _between(points: Sequence[int], value: int) -> tuple[int, int, float]:
    """Neighbouring grid points and where the value lies between them; may extrapolate upwards."""
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
) -> dict[tuple[int, int], float]:
    """Best of several timings of ``run(rows, column)`` over a grid, in seconds."""
    times: dict[tuple[int, int], float] = {}
    for size in rows:
        for column in columns:
            best = float("inf")
            for _ in range(repeats + 1):  # the first warms up
                start = clock()
                run(size, column)
                best = min(best, clock() - start)
            times[size, column] = max(best, 1e-7)
    return times


def grid_points(largest: int) -> list[int]:
    """1, 2, 4, ... up to and with ``largest``."""
    points = []
    size = 1
    while size < largest:
        points.append(size)
        size *= 2
    return [*points, largest]


_ROUNDS_WINDOW = 200.0
# Observations that the profile counts as: much for what a step costs, next to nothing for what a
# round costs beside its steps, of which it knows nothing.
_SLOPE_PRIOR, _FIXED_PRIOR = 20.0, 0.01
_LEAST_SLOPE = 0.2
_NONE = Reads()


@dataclass(slots=True)
class _Line:
    """Decayed least squares of seconds by profiled seconds: ``fixed + slope * profiled``."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    fixed: float = 0.0
    slope: float = 1.0

    def observe(self, profiled: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / _ROUNDS_WINDOW
        self.n = keep * self.n + 1.0
        self.x = keep * self.x + profiled
        self.xx = keep * self.xx + profiled * profiled
        self.y = keep * self.y + seconds
        self.xy = keep * self.xy + profiled * seconds
        prior = _SLOPE_PRIOR * self.xx / self.n
        n, xx, xy = self.n + _FIXED_PRIOR, self.xx + prior, self.xy + prior
        determinant = n * xx - self.x * self.x
        self.fixed = (self.y * xx - self.x * xy) / determinant
        self.slope = (n * xy - self.x * self.y) / determinant
        if self.fixed < 0.0:
            self.fixed, self.slope = 0.0, xy / xx
        self.slope = max(self.slope, _LEAST_SLOPE)


class DraftCosts:
    """Seconds of a round's drafting by rows, experts and steps.

    Were the time of a round simply divided by its steps, what a round costs beside them would be
    charged to every further step: after short drafts, long ones would look dear for ever.
    """

    def __init__(
        self, profile: Mapping[tuple[int, int], float], reading: ReadingCosts | None = None
    ) -> None:
        """Start from the seconds of one step, a full grid ``{(rows, experts): seconds}``.

        Args:
            profile: the grid.
            reading: what reading prompts costs; None is nothing.
        """
        self._steps = StepCosts(profile)
        self._line = _Line()
        self._measured: dict[tuple[int, int, int], Measured] = {}
        self._observed = 0
        self.reading = reading or ReadingCosts()

    def seconds(self, rows: int, experts: int, steps: int) -> float:
        """The expected time of drafting ``steps`` tokens for ``rows`` rows; 0 steps take none."""
        if not steps:
            return 0.0
        known = self._measured.get((rows, experts, steps))
        if known is not None and known.trusted(self._observed):
            return known.seconds
        return self._line.fixed + self._line.slope * steps * self._steps.profiled(rows, experts)

    def observe(
        self, rows: int, experts: int, steps: int, seconds: float, reads: Reads = _NONE
    ) -> None:
        """Take a round's drafting time.

        Args:
            rows: that drafted.
            experts: of these rows.
            steps: 0 where nothing was drafted.
            seconds: all of it.
            reads: what was read in it; where there is something it says what reading costs.
        """
        expected = self.seconds(rows, experts, steps)
        if reads.tokens:
            self.reading.read(reads, seconds - expected)
        elif steps:
            size = rows, experts, steps
            seconds = min(seconds, (OUTLIER if size in self._measured else 1.0) * expected)
            self._observed += 1
            first = Measured(seconds, 0, self._observed)
            self._measured.setdefault(size, first).take(seconds, self._observed)
            self._line.observe(steps * self._steps.profiled(rows, experts), seconds)
