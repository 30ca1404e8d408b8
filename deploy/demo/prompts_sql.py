"""Questions to be translated into SQL: domains x question forms x attributes x numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

INSTRUCTION = (
    "Could you translate the following question into SQL. "
    "Please only generate SQL, don't include explanation in the answer. "
)


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


def make(rng: random.Random) -> str:
    """One prompt: the instruction and a question about a random domain."""
    return INSTRUCTION + rng.choice(_FORMS)(rng, rng.choice(DOMAINS))


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
    return f"How many {d.many} have a {rng.choice(d.numbers)} {than} {rng.choice(_BIG)}?"


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


_FORMS = (_count, _count_number, _select_where, _select_two, _order, _extreme, _top, _aggregate,
          _group, _having, _most_common, _distinct, _both)  # fmt: skip
