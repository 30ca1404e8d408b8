"""Student's quantile: what a mean of few values may be off by."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=1024)
def student_quantile(error: float, degrees: int) -> float:
    """The t that Student's variable exceeds with a chance of ``error``.

    Args:
        error: in (0, 0.5).
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2  # t is sqrt(degrees) * tan(angle)
    for _ in range(60):
        angle = (low + high) / 2
        if (1.0 - _central_mass(angle, degrees)) / 2 > error:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _central_mass(angle: float, degrees: int) -> float:
    """Chance of abs(T) <= sqrt(degrees) * tan(angle), Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
