"""Word problems for grade school: stories x names x things x numbers."""

from __future__ import annotations

import random

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


def make(rng: random.Random) -> str:
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
