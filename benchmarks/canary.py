"""How often, and after how many requests, the canary promotes a candidate of a known gain.

    python benchmarks/canary.py

Requests are drawn, nothing is served: acceptance of a request scatters about its draft's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from paceline.actors.weights.canary import Canary, CanaryAction, CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome

_STABLE, _CANDIDATE = 1, 2
_SPREAD = 0.15  # standard deviation of a request's acceptance about its draft's
_ROUNDS = 20  # of a request, on average
_MOST = 10_000
CASES = ((0.3, 0.3), (0.5, 0.15), (0.5, 0.1), (0.5, 0.05), (0.5, 0.0), (0.5, -0.05))
CASES += ((0.5, -0.1), (0.5, -0.3))


def trial(rng: np.random.Generator, stable: float, gain: float, share: float) -> tuple[bool, int]:
    """Whether a candidate is promoted, and after how many requests of its topic."""
    canary = Canary(_CANDIDATE, _STABLE, CanarySettings())
    for number in range(1, _MOST):
        version = _CANDIDATE if rng.random() < share else _STABLE
        mean = stable + gain * (version == _CANDIDATE)
        concentration = mean * (1.0 - mean) / _SPREAD**2 - 1.0
        own = rng.beta(mean * concentration, (1.0 - mean) * concentration)
        rounds = max(1, int(rng.poisson(_ROUNDS)))
        outcome = DraftOutcome("", version, rounds, int(rng.binomial(rounds, own)))
        verdict = canary.observe(outcome)
        if verdict is not None:
            return verdict is CanaryAction.PROMOTE, number
    raise RuntimeError("undecided")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rng = np.random.default_rng(options.seed)
    sys.stdout.write("stable  gain   promoted  requests (median, 90 %)\n")
    for stable, gain in CASES:
        runs = [trial(rng, stable, gain, options.share) for _ in range(options.trials)]
        promoted = np.mean([run[0] for run in runs])
        middle, most = np.percentile([run[1] for run in runs], (50, 90))
        sys.stdout.write(
            f"{stable:.2f}   {gain:+.2f}   {promoted:7.1%}  {middle:6.0f} {most:6.0f}\n"
        )


if __name__ == "__main__":
    main()
