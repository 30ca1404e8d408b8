"""Prompts of the demo: a seeded generator per topic, thousands of combinations each.

They are written for this repository in the style of four topics; none is a row of a data set. The
same seed gives the same prompts everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

NAMES: tuple[str, ...] = tuple(
    """
    Amara Bruno Celia Dmitri Elif Farid Greta Hugo Ines Jonas Kavya Leo Mira Nadia Otis Priya
    Quentin Rosa Samir Tessa Umar Vera Wendell Ximena Yusuf Zofia Anton Bea Carlos Dina
    """.split()  # noqa: SIM905
)
_FRUIT = ("apples", "plums", "peaches", "lemons", "mangoes", "pears")
_GOODS = ("candles", "notebooks", "scarves", "mugs", "kites", "puzzles", "baskets", "posters")
_SHOPS = ("market stall", "corner shop", "school fair", "garage sale", "craft booth")
_ANIMALS = ("goats", "ducks", "rabbits", "ponies", "turtles", "hens")
_TASKS = ("reading", "painting a fence", "practicing the cello", "swimming", "repairing bikes")


def make_math(rng: random.Random) -> str:
    """One prompt: a short story with numbers and a question."""
    story = rng.choice(_STORIES)
    first, second, third = rng.sample(NAMES, 3)
    n = [rng.randint(2, 12) for _ in range(3)]
    return story.format(
        A=first,
        B=second,
        C=third,
        fruit=rng.choice(_FRUIT),
        goods=rng.choice(_GOODS),
        shop=rng.choice(_SHOPS),
        animals=rng.choice(_ANIMALS),
        task=rng.choice(_TASKS),
        s=n[0],
        t=n[1],
        u=n[2],
        big=rng.randint(4, 30) * 12,
        money=rng.randint(5, 40) * 5,
        price=rng.randint(2, 15),
        pct=rng.choice((10, 20, 25, 30, 40, 50)),
        part=rng.choice(("half", "a third", "a quarter")),
        times=rng.choice(("twice", "three times", "four times")),
    )


_STORIES: tuple[str, ...] = (
    "{A} picks {s} baskets of {fruit} every day. Each basket holds {t} {fruit}. How many {fruit} "
    "does {A} pick in {u} days?",
    "{A} has {big} {fruit}. {A} gives {part} of them to {B} and {s} of the rest to {C}. How many "
    "{fruit} does {A} have left?",
    "{A} sells {goods} at a {shop} for ${price} each. On Saturday {A} sells {s} {goods} and on "
    "Sunday {times} as many. How much money does {A} make on the weekend?",
    "{A} buys {s} {goods} for ${price} each and pays with ${money}0. How much change does {A} get "
    "back?",
    "{A} is {s} years older than {B}. {B} is {times} as old as {C}, who is {t}. How old is {A}?",
    "{A} spends {s}0 minutes a day {task}. {B} spends {times} as long. How many hours do they "
    "spend {task} together in {t} days?",
    "A farm has {s} times as many {animals} as sheep. There are {big} sheep and {t} horses. How "
    "many animals are on the farm in all?",
    "{A} earns ${price} an hour and works {s} hours a day, {t} days a week. How much does {A} earn "
    "in {u} weeks?",
    "A box of {goods} costs ${money}. During a sale at the {shop} the price is {pct}% lower. How "
    "much do {s} boxes cost during the sale?",
    "{A} reads {s}0 pages on Monday, {t} more pages on Tuesday than on Monday, and {times} as many "
    "on Wednesday as on Monday. How many pages does {A} read in the three days?",
    "{A}, {B} and {C} share {big} {fruit}. {A} takes {s} and {B} takes {times} as many as {A}. How "
    "many {fruit} are left for {C}?",
    "A bus has {big} seats. At the first stop {s}0 people get on, at the second {t} people get "
    "off and {u} get on. How many seats are empty?",
    "{A} wants to save ${money}0. {A} already has ${money} and saves ${price} every week. How "
    "many weeks does {A} need?",
    "{A} bakes {s} trays of {t} cookies. {B} eats {part} of the cookies. How many cookies remain?",
    "A train travels {s}0 miles per hour for {t} hours and then {u}0 miles per hour for {s} "
    "hours. How many miles does it travel?",
    "{A} has {s} {animals}. Each eats {t} cups of food a day. A bag holds {big} cups. How many "
    "bags does {A} need for {u}0 days?",
    "{B} has {times} as many {goods} as {A}. Together with {C}, who has {s}, they own {big} "
    "{goods}. How many {goods} does {A} have?",
    "At the {shop}, {A} buys {s} {goods} at ${price} each and {t} bags of {fruit} at ${u} each. "
    "{B} pays {part} of the bill. How much does {A} pay?",
)


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


def make_code(rng: random.Random) -> str:
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


INSTRUCTION = "Could you translate the following question into SQL."


@dataclass(frozen=True, slots=True)
class Domain:
    """A table that one may ask about: its rows' name and its columns by kind."""

    one: str
    many: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]


def _domain(one: str, many: str, texts: str, numbers: str, groups: str) -> Domain:
    """``texts`` and ``numbers``: words by comma; ``groups``: ``column: value/value, …``."""
    pairs = (group.split(":") for group in groups.split(","))
    return Domain(
        one,
        many,
        tuple(word.strip() for word in texts.split(",")),
        tuple(word.strip() for word in numbers.split(",")),
        tuple(
            (name.strip(), tuple(v.strip() for v in values.split("/"))) for name, values in pairs
        ),
    )


DOMAINS: tuple[Domain, ...] = (
    _domain("lighthouse", "lighthouses", "name, location, keeper", "height, year built, range",
            "country: Norway/Chile/Ireland, color: white/red"),
    _domain("bakery", "bakeries", "name, address, owner", "capacity, rating, number of ovens",
            "city: Lyon/Porto/Denver, type: organic/family"),
    _domain("telescope", "telescopes", "name, site, operator", "aperture, weight, cost",
            "country: Chile/Spain/Japan, type: radio/optical"),
    _domain("ferry", "ferries", "name, captain, home port", "capacity, speed, length",
            "company: Blue Line/Coastal, status: active/retired"),
    _domain("orchard", "orchards", "name, owner, address", "area, number of trees, yield",
            "region: Kent/Jaén/Hesse, fruit: apple/olive"),
    _domain("violinist", "violinists", "name, teacher, birth place",
            "age, number of concerts, salary",
            "nationality: Polish/Korean/Cuban, orchestra: Philharmonic/Chamber"),
    _domain("bridge", "bridges", "name, location, architect", "length, height, year opened",
            "material: steel/stone, country: Italy/Peru/Canada"),
    _domain("podcast", "podcasts", "title, host, publisher", "number of episodes, rating, duration",
            "genre: history/science/comedy, language: English/Danish"),
    _domain("greenhouse", "greenhouses", "name, manager, address", "area, temperature, humidity",
            "crop: tomato/pepper/basil, city: Almeria/Delft"),
    _domain("courier", "couriers", "name, phone number, email", "age, number of deliveries, salary",
            "city: Oslo/Quito/Austin, vehicle: bike/van"),
    _domain("chess player", "chess players", "name, club, coach", "rating, age, number of wins",
            "country: India/Armenia/Cuba, title: Grandmaster/Master"),
    _domain("museum", "museums", "name, director, address",
            "number of visitors, open year, ticket price",
            "city: Athens/Bogota/Kyoto, type: art/science"),
    _domain("tram", "trams", "number, driver, depot", "capacity, speed, mileage",
            "line: Harbor/Central, maker: Siemens/Skoda"),
    _domain("clinic", "clinics", "name, address, phone number",
            "number of beds, number of doctors, budget",
            "county: Essex/Lane/Kerry, type: dental/general"),
    _domain("vineyard", "vineyards", "name, owner, village", "area, age, production",
            "grape: Merlot/Riesling, region: Mosel/Douro/Napa"),
    _domain("drone", "drones", "model, serial number, pilot", "weight, battery capacity, price",
            "status: active/broken, maker: Aero/Volant"),
    _domain("library", "libraries", "name, address, librarian",
            "number of books, open year, budget",
            "district: North/East/Harbor, type: public/school"),
    _domain("comet", "comets", "name, discoverer, designation", "period, diameter, speed",
            "class: short/long, catalog: A/B"),
    _domain("swimmer", "swimmers", "name, coach, club", "age, height, number of medals",
            "nationality: Dutch/Kenyan/Greek, stroke: butterfly/freestyle"),
    _domain("warehouse", "warehouses", "name, address, manager", "capacity, area, number of boxes",
            "city: Gdansk/Tulsa/Nagoya, status: full/open"),
    _domain("novel", "novels", "title, author, publisher", "number of pages, price, year published",
            "genre: mystery/romance, language: French/Swahili/English"),
    _domain("hiking trail", "hiking trails", "name, start point, end point",
            "length, elevation, rating",
            "park: Glacier/Redwood, difficulty: easy/hard"),
    _domain("kindergarten", "kindergartens", "name, head teacher, address",
            "number of children, number of teachers, fee",
            "city: Turku/Leeds/Perth, type: public/private"),
    _domain("satellite", "satellites", "name, operator, launch site", "mass, altitude, cost",
            "orbit: low/high, country: India/France/Brazil"),
)  # fmt: skip

_ASK = ("What are", "Find", "Show", "List", "Return", "Give me")
_BIG = (10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 100, 120, 150, 200, 250, 300, 500, 800, 1000, 2000)


def make_sql(rng: random.Random) -> str:
    """One prompt: the instruction, a table with its columns, and a question about it."""
    form, domain = rng.choice(_SQL_FORMS), rng.choice(DOMAINS)
    groups = (name for name, _ in domain.groups)
    columns = ", ".join(map(_identifier, (*domain.texts, *domain.numbers, *groups)))
    table = f"{_identifier(domain.many)}({columns})"
    return f"{INSTRUCTION} The table is {table}. {form(rng, domain)}"


def _identifier(words: str) -> str:
    return words.replace(" ", "_")


def _end(ask: str, rest: str) -> str:
    """A sentence from its opening words: a question mark where they ask."""
    return f"{ask} {rest}" + ("?" if ask.split()[0] in ("What", "Which", "How") else ".")


def _many(column: str) -> str:
    """The plural of a column's name: ``number of trees`` becomes ``numbers of trees``."""
    head, *rest = column.split(" of ") if " of " in column else column.rsplit(" ", 1)[::-1]
    if head in ("built", "opened", "published"):
        return f"{rest[0]}s {head}"
    head = head[:-1] + "ie" if head.endswith("y") else head + "e" * head.endswith(("s", "ss"))
    return f"{head}s of {rest[0]}" if " of " in column else " ".join((*rest, f"{head}s"))


def _count(rng: random.Random, d: Domain) -> str:
    column, values = rng.choice(d.groups)
    form = rng.choice(("How many {m} have the {c} {v}?", "Count the {m} whose {c} is {v}."))
    return form.format(m=d.many, c=column, v=rng.choice(values))


def _count_number(rng: random.Random, d: Domain) -> str:
    than = rng.choice(("larger than", "smaller than", "greater than", "less than", "at least"))
    number = rng.choice(d.numbers)
    article = "an" if number[0] in "aeiou" else "a"
    return f"How many {d.many} have {article} {number} {than} {rng.choice(_BIG)}?"


def _select_where(rng: random.Random, d: Domain) -> str:
    text, number = rng.choice(d.texts), rng.choice(d.numbers)
    than = rng.choice(("larger than", "smaller than", "above", "below"))
    rest = f"the {_many(text)} of {d.many} whose {number} is {than} {rng.choice(_BIG)}"
    return _end(rng.choice(_ASK), rest)


def _select_two(rng: random.Random, d: Domain) -> str:
    first, second = rng.sample((*d.texts, *d.numbers), 2)
    column, values = rng.choice(d.groups)
    rest = (
        f"the {_many(first)} and {_many(second)} of all {d.many} with {column} {rng.choice(values)}"
    )
    return _end(rng.choice(_ASK), rest)


def _order(rng: random.Random, d: Domain) -> str:
    text, number = rng.choice(d.texts), rng.choice(d.numbers)
    way = rng.choice(("ascending", "descending", "alphabetical"))
    by = text if way == "alphabetical" else number
    what = f"{_many(text)} and {_many(number)}" if rng.random() < 0.5 else _many(text)
    rest = f"the {what} of the {d.many} in {way} order of {by}"
    return _end(rng.choice(_ASK), rest)


def _extreme(rng: random.Random, d: Domain) -> str:
    most = rng.choice(("highest", "lowest", "largest", "smallest"))
    ask = rng.choice(("What is", "Find", "Show", "Return", "Give me"))
    rest = f"the {rng.choice(d.texts)} of the {d.one} with the {most} {rng.choice(d.numbers)}"
    return _end(ask, rest)


def _top(rng: random.Random, d: Domain) -> str:
    most = rng.choice(("highest", "lowest", "largest", "smallest"))
    which = f"{rng.choice((2, 3, 5, 10))} {d.many} with the {most} {rng.choice(d.numbers)}"
    return _end(rng.choice(_ASK), f"the {_many(rng.choice(d.texts))} of the {which}")


def _aggregate(rng: random.Random, d: Domain) -> str:
    which = rng.choice(("average", "maximum", "minimum", "total", "average and maximum",
                        "minimum and maximum", "average and total"))  # fmt: skip
    ask = rng.choice(("What is", "Find", "Show", "Return")) if " and " not in which else "What are"
    column, values = rng.choice(d.groups)
    where = (
        "all " + d.many if rng.random() < 0.4 else f"{d.many} with {column} {rng.choice(values)}"
    )
    return _end(ask, f"the {which} {rng.choice(d.numbers)} of {where}")


def _group(rng: random.Random, d: Domain) -> str:
    column, _ = rng.choice(d.groups)
    what = rng.choice(("the number of", "the average {n} of", "the maximum {n} of"))
    what = f"{what.format(n=rng.choice(d.numbers))} {d.many}"
    return _end(rng.choice(("What is", "Show", "Find", "Return")), f"{what} for each {column}")


def _having(rng: random.Random, d: Domain) -> str:
    column, _ = rng.choice(d.groups)
    n = rng.choice((1, 2, 3, 4, 5, 6, 8, 10))
    ask = rng.choice(("Show", "Find", "List", "Return"))
    return _end(ask, f"each {column} that has more than {n} {d.many}")


def _most_common(rng: random.Random, d: Domain) -> str:
    column, _ = rng.choice(d.groups)
    form = rng.choice(("Which {c} has the most {m}?", "What is the {c} with the fewest {m}?",
                       "Show the most common {c} of {m}."))  # fmt: skip
    return form.format(c=column, m=d.many)


def _distinct(rng: random.Random, d: Domain) -> str:
    column, _ = rng.choice(d.groups)
    form = rng.choice(("How many different {c} values do the {m} with {n} over {b} have?",
                       "Show the distinct {c} of {m} whose {n} is over {b}."))  # fmt: skip
    return form.format(c=column, m=d.many, n=rng.choice(d.numbers), b=rng.choice(_BIG))


def _both(rng: random.Random, d: Domain) -> str:
    (one, ones), (two, twos) = rng.sample(d.groups, 2)
    joint = rng.choice(("and", "or"))
    rest = f"the {_many(rng.choice(d.texts))} of {d.many} whose {one} is {rng.choice(ones)}"
    return _end(rng.choice(_ASK), f"{rest} {joint} whose {two} is {rng.choice(twos)}")


_SQL_FORMS = (_count, _count_number, _select_where, _select_two, _order, _extreme, _top, _aggregate,
          _group, _having, _most_common, _distinct, _both)  # fmt: skip


COMMAND_TASKS: tuple[tuple[str, str], ...] = tuple(
    (command.strip(), task.strip())
    for command, task in (
        line.split(":", 1)
        for line in """
    ls: list the files in {dir} that end in {ext}
    ls: sort the {ext} files in {dir} by size
    cp: copy {file} to {dir}
    cp: copy every {ext} file to {dir}
    mv: rename {file} to {other}
    mv: move {file} to {dir}
    rm: delete the {ext} files in {dir}
    mkdir: create the folder {dir} and its parents
    cat: show {file} with line numbers
    cat: join {file} and {other}
    head: show the first {n} lines of {file}
    tail: show the last {n} lines of {file}
    tail: follow {file} while it grows
    grep: search for the word {word} in {dir}
    grep: count the lines of {file} that contain {word}
    grep: find the {ext} files in {dir} that mention {word}
    sed: replace the word {word} by {new} in {file}
    sed: delete the first {n} lines of {file}
    awk: print the second column of {file}
    awk: sum the numbers in column {n} of {file}
    sort: sort the lines of {file} by number
    uniq: count the repeated lines of {file}
    wc: count the lines of {file}
    wc: count the words in the {ext} files of {dir}
    find: find the {ext} files in {dir}
    find: find files in {dir} that are larger than {n} MB
    find: find files in {dir} that changed in the last {n} days
    chmod: make {script} executable
    chmod: make {file} readable for all users
    chown: give {dir} to the user {user}
    du: show the size of {dir}
    df: show the free space of the disk with {dir}
    tar: pack the folder {dir} into {name}.tar.gz
    tar: unpack {name}.tar.gz into {dir}
    zip: pack {file} and {other} into {name}.zip
    unzip: unpack {name}.zip into {dir}
    gzip: compress {file}
    diff: compare {file} with {other}
    ln: make a link from {file} to {dir}
    scp: copy {file} to the server {host}
    rsync: copy the folder {dir} to the server {host}
    ssh: log in to the server {host} as {user}
    ssh: run {script} on the server {host}
    curl: download {file} from {host}.example.com
    wget: download {name}.zip from {host}.example.com
    ping: check whether {host} answers
    ps: list the processes of the user {user}
    kill: stop the process with the number {n}00
    crontab: run {script} every {n} minutes
    nohup: run {script} after I log out
    time: measure how long {script} takes
    systemctl: restart the service {service}
    systemctl: start the service {service} when the machine boots
    journalctl: show the last {n} messages of {service}
    apt: install the package {package}
    apt: remove the package {package}
    pip: install version {n} of the package {package}
    git clone: get a copy of the project {name} from {host}.example.com
    git checkout: create the branch {branch}
    git merge: merge the branch {branch}
    git commit: save my changes to {file}
    git log: show the last {n} changes of {file}
    git push: publish the branch {branch}
    docker run: start {service} in a container on port {n}000
    docker build: build an image with the name {name}
    docker logs: show the last {n} lines of the container {name}
    docker cp: copy {file} into the container {name}
    kubectl scale: run {n} copies of {service}
    kubectl logs: show the messages of {service}
    jq: print the field {word} of {name}.json
    openssl: make a certificate for {host}.example.com
    ffmpeg: turn {name}.mp4 into {name}.mp3
    """.strip().splitlines()
    )
)
_SHELL_WORDS: dict[str, tuple[str, ...]] = {
    slot: tuple(words.split())
    for slot, words in {
        "dir": "/var/log /etc /srv/www ~/photos ~/projects ~/music /tmp/build /mnt/usb ~/reports "
        "/opt/data ~/drafts /home/vera",
        "file": "notes.txt server.log main.py report.csv data.tsv config.yaml index.html todo.md "
        "access.log sales.csv letter.txt prices.tsv",
        "other": "plan.txt old.log backup.py summary.csv draft.md copy.yaml",
        "ext": ".log .txt .py .csv .md .jpg .json .yaml",
        "word": "timeout error warning login orders total user failed",
        "new": "retry notice info signup sales sum",
        "script": "backup.sh build.sh report.py clean.sh deploy.sh test.py sync.sh train.py",
        "name": "photos website archive project music games lessons recipes garden atlas",
        "host": "alpha backup mirror storage gateway harbor node7 build2",
        "user": "vera hugo deploy kavya otis backup",
        "service": "nginx postgresql redis ssh cron mysql",
        "package": "curl htop numpy requests jq pandas flask git",
        "branch": "login search payments fix-tests release docs",
        "n": "2 3 4 5 6 8 10 20 30 50",
    }.items()
}
_SHELL_FORMS: tuple[str, ...] = (
    "How do I use the command `{c}` in a terminal to {t}? "
    "Give one example with a short explanation.",
    "How can I use the command `{c}` in a terminal to {t}? "
    "Give one example with a short explanation.",
)


def make_shell(rng: random.Random) -> str:
    """One prompt: a command and what it shall do."""
    command, task = rng.choice(COMMAND_TASKS)
    words = {slot: rng.choice(choices) for slot, choices in _SHELL_WORDS.items()}
    return rng.choice(_SHELL_FORMS).format(c=command, t=task.format(**words))


Maker = Callable[[random.Random], str]

MAKERS: dict[str, Maker] = {
    "math": make_math,
    "code": make_code,
    "sql": make_sql,
    "shell": make_shell,
}
TOPICS: tuple[str, ...] = tuple(MAKERS)
_MAX_REPEATS = 2_000  # draws in a row that may repeat an earlier prompt before giving up


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Prompts of a topic, without duplicates.

    Attributes:
        last: of the last measurement.
        stream: of the stream, endless.
    """

    last: tuple[str, ...]
    stream: Iterator[str]


def endless(topic: str, seed: int) -> Iterator[str]:
    """Distinct prompts of a topic, in an order fixed by the seed.

    Raises:
        KeyError: the topic is not among ``TOPICS``.
        ValueError: no combination is left.
    """
    make, rng = MAKERS[topic], random.Random(f"{seed}:{topic}")
    found: set[str] = set()
    repeats = 0
    while repeats <= _MAX_REPEATS:
        text = make(rng)
        if text in found:
            repeats += 1
            continue
        repeats = 0
        found.add(text)
        yield text
    raise ValueError(f"{topic}: only {len(found)} distinct prompts")


def generate(topic: str, count: int, seed: int) -> tuple[str, ...]:
    """The first ``count`` prompts of :func:`endless`."""
    return tuple(islice(endless(topic, seed), count))


def split(topic: str, seed: int, measured: int = 40) -> PromptSplit:
    """Split a topic's prompts into those of the last measurement and those of the stream."""
    texts = endless(topic, seed)
    return PromptSplit(tuple(islice(texts, measured)), texts)
