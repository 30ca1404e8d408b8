"""Small programming tasks with a test: containers x filters x transforms x reductions x numbers.

The expected value of each test is computed here, so that every prompt is true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Number = int | float

_FILTERS: tuple[tuple[str, str, Callable[[int, int], bool]], ...] = (
    ("even", "even", lambda x, _: x % 2 == 0),
    ("odd", "odd", lambda x, _: x % 2 == 1),
    ("positive", "positive", lambda x, _: x > 0),
    ("negative", "negative", lambda x, _: x < 0),
    ("greater than {n}", "greater", lambda x, n: x > n),
    ("smaller than {n}", "smaller", lambda x, n: x < n),
    ("divisible by {n}", "divisible", lambda x, n: x % n == 0),
    ("not divisible by {n}", "indivisible", lambda x, n: x % n != 0),
)
_TRANSFORMS: tuple[tuple[str, str, Callable[[int], int]], ...] = (
    ("", "", lambda x: x),
    ("squares of the ", "square_", lambda x: x * x),
    ("cubes of the ", "cube_", lambda x: x**3),
    ("doubles of the ", "double_", lambda x: 2 * x),
    ("absolute values of the ", "absolute_", abs),
    ("last digits of the ", "last_digit_", lambda x: abs(x) % 10),
)
_REDUCTIONS: tuple[tuple[str, str, Callable[[Sequence[int]], object]], ...] = (
    ("find the sum of the", "sum", sum),
    ("find the largest of the", "largest", lambda v: max(v, default=None)),
    ("find the smallest of the", "smallest", lambda v: min(v, default=None)),
    ("count the", "count", len),
    ("sort the", "sort", sorted),
    ("list the", "list", list),
    ("reverse the list of the", "reverse", lambda v: list(reversed(v))),
    ("remove duplicates from the", "unique", lambda v: sorted(set(v))),
)
_WORDS: tuple[str, ...] = tuple(
    """
    apple bridge candle desert engine forest garden harbor island jacket kettle lantern marble
    needle orange pencil quarry ribbon saddle temple umbrella valley window yellow zipper anchor
    basket copper dragon eleven feather guitar hammer insect jungle
    """.split()  # noqa: SIM905
)
_TEXT_TASKS: tuple[tuple[str, str, Callable[[str, str], object]], ...] = (
    ("count how often the letter {c} occurs in a given string", "count_letter",
     lambda s, c: s.count(c)),
    ("remove every letter {c} from a given string", "remove_letter", lambda s, c: s.replace(c, "")),
    ("find the first position of the letter {c} in a given string", "find_letter",
     lambda s, c: s.find(c)),
    ("check whether a given string starts with the letter {c}", "starts_with",
     lambda s, c: s.startswith(c)),
    ("check whether a given string ends with the letter {c}", "ends_with",
     lambda s, c: s.endswith(c)),
    ("split a given string at the letter {c}", "split_at", lambda s, c: s.split(c)),
    ("replace the letter {c} by an underscore in a given string", "replace_letter",
     lambda s, c: s.replace(c, "_")),
    ("count the letters of a given string that are not {c}", "count_others",
     lambda s, c: len(s) - s.count(c)),
    ("return the part of a given string after the last letter {c}", "after_last",
     lambda s, c: s.rsplit(c, 1)[-1]),
    ("change the letter {c} to upper case in a given string", "upper_letter",
     lambda s, c: s.replace(c, c.upper())),
)  # fmt: skip
_WORD_TASKS: tuple[tuple[str, str, Callable[[list[str]], object]], ...] = (
    ("find the longest word in a given list", "longest_word", lambda w: max(w, key=len)),
    ("find the shortest word in a given list", "shortest_word", lambda w: min(w, key=len)),
    ("sort a given list of words by length", "sort_by_length", lambda w: sorted(w, key=len)),
    ("join a given list of words with dashes", "join_words", lambda w: "-".join(w)),
    ("count the letters of all words in a given list", "count_letters",
     lambda w: sum(map(len, w))),
    ("return the first letters of the words in a given list", "first_letters",
     lambda w: [word[0] for word in w]),
    ("reverse every word in a given list", "reverse_words", lambda w: [word[::-1] for word in w]),
    ("map each word of a given list to its length", "word_lengths",
     lambda w: {word: len(word) for word in w}),
    ("put a given list of words in alphabetical order", "sort_words", sorted),
    ("capitalize the words of a given list", "capitalize_words",
     lambda w: [word.capitalize() for word in w]),
)  # fmt: skip
_OPENINGS = ("Write a function to", "Write a python function to")


def make(rng: random.Random) -> str:
    """One prompt: the task in a sentence, then a test that a right answer passes."""
    task, call, result = rng.choice((_numbers, _numbers, _letters, _word_list, _matrix))(rng)
    test = f"assert {call}=={result!r}"
    return f"{rng.choice(_OPENINGS)} {task}. Your code should satisfy the test: {test}"


def _numbers(rng: random.Random) -> tuple[str, str, object]:
    verb, verb_name, reduce = rng.choice(_REDUCTIONS)
    of, of_name, transform = rng.choice(_TRANSFORMS)
    which, which_name, keep = rng.choice(_FILTERS)
    n = rng.randint(2, 9)
    container = rng.choice(("list", "tuple"))
    values = [rng.randint(-9, 30) for _ in range(rng.randint(4, 7))]
    shown = values if container == "list" else tuple(values)
    result = reduce([transform(x) for x in values if keep(x, n)])
    where = which.format(n=n)
    what = f"numbers {where}" if "{n}" in which else f"{where} numbers"
    name = f"{verb_name}_{of_name}{which_name}"
    return f"{verb} {of}{what} in a given {container}", f"{name}({shown!r})", result


def _letters(rng: random.Random) -> tuple[str, str, object]:
    task, name, solve = rng.choice(_TEXT_TASKS)
    word = rng.choice(_WORDS)
    letter = rng.choice(word)
    return task.format(c=letter), f"{name}({word!r})", solve(word, letter)


def _word_list(rng: random.Random) -> tuple[str, str, object]:
    task, name, solve = rng.choice(_WORD_TASKS)
    words = rng.sample(_WORDS, rng.randint(2, 4))
    return task, f"{name}({words!r})", solve(words)


def _matrix(rng: random.Random) -> tuple[str, str, object]:
    rows = [[rng.randint(0, 12) for _ in range(3)] for _ in range(rng.randint(2, 3))]
    task, name, result = rng.choice(
        (
            ("find the sum of each row of a given matrix", "row_sums", [sum(r) for r in rows]),
            ("find the largest element of each row of a given matrix", "row_max",
             [max(r) for r in rows]),
            ("transpose a given matrix", "transpose", [list(c) for c in zip(*rows, strict=True)]),
            ("flatten a given matrix to a list", "flatten", [x for r in rows for x in r]),
            ("find the sum of each column of a given matrix", "column_sums",
             [sum(c) for c in zip(*rows, strict=True)]),
            ("sort the rows of a given matrix by their sum", "sort_rows", sorted(rows, key=sum)),
        )
    )  # fmt: skip
    return task, f"{name}({rows!r})", result
