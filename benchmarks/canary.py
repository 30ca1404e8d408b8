"""Probability, and number of requests, of the canary's promotion of a candidate of a known gain.

python benchmarks/canary.py    # requests are drawn, nothing is served
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from harness import arguments, show

from paceline.actors.weights.canary import Canary, CanaryAction, CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome

_STABLE, _CANDIDATE = 1, 2
_SPREAD = 0.15  # standard deviation of a request's acceptance about its draft's
_ROUNDS = 20  # of a request, on average
_MOST = 10_000
CASES = ((0.3, 0.3), *((0.5, gain) for gain in (0.15, 0.1, 0.05, 0.0, -0.05, -0.1, -0.3)))


def trial(rng: np.random.Generator, stable: float, gain: float, share: float) -> tuple[bool, int]:
    """Whether a candidate is promoted, and the requests of its topic until the decision."""
    canary = Canary(_CANDIDATE, _STABLE, CanarySettings())
    for number in range(1, _MOST):
        version = _CANDIDATE if rng.random() < share else _STABLE
        mean = stable + gain * (version == _CANDIDATE)
        concentration = mean * (1.0 - mean) / _SPREAD**2 - 1.0
        own = rng.beta(mean * concentration, (1.0 - mean) * concentration)
        rounds = max(1, int(rng.poisson(_ROUNDS)))
        outcome = DraftOutcome("", version, rounds, int(rng.binomial(rounds, own)))
        action = canary.observe(outcome)
        if action is not None:
            return action is CanaryAction.PROMOTE, number
    raise RuntimeError("undecided")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rng, rows = np.random.default_rng(options.seed), []
    for stable, gain in CASES:
        runs = [trial(rng, stable, gain, options.share) for _ in range(options.trials)]
        promoted = float(np.mean([run[0] for run in runs]))
        median, p90 = np.percentile([run[1] for run in runs], (50, 90))
        row = {"stable": stable, "gain": gain, "promoted": promoted}
        rows.append(row | {"requests, median": median, "90 %": p90})
    show("Canary", rows)


if __name__ == "__main__":
    main()
