"""Self-written prompts of a topic that no router was trained on, and of another."""

from __future__ import annotations

import random

_CITIES = (
    "Lisbon", "Tallinn", "Kyoto", "Quito", "Bergen", "Porto", "Hanoi", "Split", "Lyon", "Oaxaca",
    "Tbilisi", "Cusco", "Galway", "Riga", "Cadiz", "Busan",
)  # fmt: skip
_WAYS = ("by night train", "by ferry", "by bus", "on a bicycle", "in a camper van")
_WITH = ("two small children", "my grandmother", "a large dog", "an old friend", "no car")
_TRIPS = (
    "Plan a {n} day trip from {a} to {b} {w}.",
    "I will be in {a} for {n} days with {p}. Which sights should I see?",
    "What is the best way to get from {a} to {b} {w}?",
    "Book me a hotel near the station of {a}, {n} nights, for {p} and me.",
    "Make a packing list for {n} days in {a} with {p}.",
    "Which day trips can I make from {a} {w}? I have {n} days.",
    "Do I need a visa for {a} if I come from {b} and stay {n} days?",
)


def trips(count: int, seed: int = 0) -> list[str]:
    """Different questions of travellers, always the same for a seed."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        start, end = rng.sample(_CITIES, 2)
        words = {"a": start, "b": end, "w": rng.choice(_WAYS), "p": rng.choice(_WITH)}
        found[rng.choice(_TRIPS).format(n=rng.randint(2, 14), **words)] = None
    return list(found)
