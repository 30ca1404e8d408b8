"""Prompts for the router: the rows' own, the same in other words, and prompts of no topic.

The rows of a topic come in one or two fixed forms ("Could you translate the following question
into SQL …"). A router that saw only these would learn the form, so every topic is also put in
forms written for this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from paceline.deploy.recipes.data import GENERAL, Row

SQL_FORMS = (
    "Write an SQL query: {q}",
    "Translate to SQL: {q}",
    "SQL please. {q}",
    "What SQL statement answers this? {q}",
    "Give me a SELECT statement for: {q}",
    "Using SQL, {q}",
    "Question for the database: {q} Answer with a query.",
    "I have a table in Postgres. {q}",
    "{q} Write the query.",
    "{q} (SQLite)",
)
CODE_FORMS = (
    "Write a Python function for this: {q}",
    "Implement in Python: {q}",
    "{q} Use Python.",
    'def solve(...):\n    """{q}"""',
    "Complete the function. {q}",
    "Please write code that does this: {q}",
    "Write a method: {q}",
    "Python function. {q}",
    "How would you code this? {q}",
    "Fill in the body:\n{q}",
)
SHELL_FORMS = (
    "What does the `{c}` command do?",
    "Show me how to use {c} in the terminal.",
    "Examples of {c} on the command line, please.",
    "Usage of `{c}`",
    "man {c}",
    "Give short examples for the shell command {c}.",
    "How can I use {c} on Linux?",
)
SHELL_TASK_FORMS = (
    "How do I do this in bash: {q}?",
    "Shell command to {q}",
    "Which command line would {q}?",
    "On Linux, how can I {q}?",
    "Terminal one-liner: {q}",
)
MATH_FORMS = (
    "{q}",
    "Solve step by step: {q}",
    "Work this out. {q}",
    "Math problem: {q}",
    "{q} Show your working.",
    "Calculate: {q}",
)
GENERAL_FORMS = (
    "Tell me about {t}.",
    "Write a short {g} about {t}.",
    "What do you think of {t}?",
    "Explain {t} to a child.",
    "Why do people like {t}?",
    "Give me three ideas about {t}.",
    "Write an email to my manager about {t}.",
    "Summarise the history of {t}.",
    "Translate into French: I would like to know more about {t}.",
    "Plan a weekend around {t}.",
    "Who was the first to write about {t}?",
    "Write a {g} in which {t} and {u} play a part.",
    "Is {t} good for my health?",
    "Compare {t} with {u}.",
    "Draft a tweet on {t}.",
    "What are the pros and cons of {t}?",
    "What is the capital of the country best known for {t}?",
    "Can you recommend a book on {t}?",
    "Pretend you are an expert in {t}. Introduce yourself in character and greet the visitors.",
    "Let's do a role play. You are {r} who loves {t}. I ask the questions and you stay in role.",
    "Write a dialogue between {r} and {s} who disagree over {t}. Make it funny and a bit sad.",
    "I am {r}. Suggest how I could bring {t} into my daily life, and what to avoid.",
    "Compose a {g} of about 300 words on {t}. Use vivid language and describe the setting.",
    "Continue the {g}: She had never cared for {t}, until one evening {s} knocked at the door.",
    "What were the main causes and consequences of the debate on {t}? Discuss in two paragraphs.",
    "Create an outline for a blog post, with headings, on {t} for an audience of {s}s.",
    "Edit this paragraph and correct the grammar: me and {s} was going to see {t} yesterday.",
    "when did {t} become popular",
    "who invented {t}",
    "where does the word for {t} come from",
    "how long does it take to learn about {t}",
    "who sings the song about {t}",
    "List the characters of a fantasy world built on {t}: their names, looks, hopes and fears.",
    "Write the opening scene of a screenplay. {r} enters, thinking of {t}. Then {s} appears.",
    "Which is more important for society, {t} or {u}? Give reasons.",
    "What is the difference between {t} and {u}, and how do they influence each other?",
)
READING_FORMS = (
    "Summarize: {q}",
    "{q}\n\nWhat is this text about?",
    "Summarise the following text:\n{q}",
    "Rewrite this in simpler words. {q}",
    "Translate into German: {q}",
    "Give it a title: {q}",
    "{q}",
)
GENRES = (
    "poem",
    "story",
    "song",
    "letter",
    "speech",
    "essay",
    "scene",
    "fairy tale",
    "review",
    "limerick",
    "monologue",
    "fan fiction",
    "news report",
    "diary entry",
    "thriller",
)
ROLES = (
    "a tired wizard",
    "a teacher",
    "a ship's cook",
    "a detective",
    "a retired nurse",
    "a young queen",
    "a taxi driver",
    "a space pilot",
    "a librarian",
    "a stage actor",
    "a doctor",
    "a shy vampire",
    "a football coach",
    "a gardener",
    "a history student",
)
GENERAL_THEMES = (
    "gardening",
    "the Roman empire",
    "jazz",
    "coffee",
    "black holes",
    "chess",
    "Iceland",
    "electric cars",
    "the French Revolution",
    "sleep",
    "job interviews",
    "wedding speeches",
    "dinosaurs",
    "climate policy",
    "yoga",
    "football",
    "old films",
    "bread",
    "photography",
    "Shakespeare",
    "the ocean",
    "remote work",
    "vaccines",
    "mountain hiking",
    "street food",
    "impressionism",
    "opera",
    "cats",
    "dogs",
    "inflation",
    "mythology",
    "volcanoes",
    "fashion",
    "train journeys",
    "bees",
    "the moon landing",
    "public speaking",
    "friendship",
    "tea",
    "architecture",
    "marathon training",
    "a lost umbrella",
    "lighthouses",
    "my new neighbours",
)
GREETINGS = (
    "hi",
    "hello there",
    "good morning! how are you?",
    "thanks, that helps",
    "who are you?",
    "what can you do?",
    "tell me a joke",
    "i am bored",
    "what should i cook tonight?",
    "my friend is angry with me, what should i say?",
    "what's the weather like?",
    "recommend a film for tonight",
    "how do i get better at small talk?",
    "goodbye",
    "can you help me with something?",
    "sing me a song",
    "what is the meaning of life?",
    "do you like music?",
    "i had a bad day at work",
    "what year did the war end?",
    "who painted the Mona Lisa?",
    "is it rude to arrive early?",
    "help me name my dog",
    "what is the tallest mountain?",
    "write a birthday wish for my aunt",
)

Form = Callable[[Row, np.random.Generator], str]


def sql_question(row: Row, rng: np.random.Generator) -> str:
    """A Spider question in another form; its fixed sentences are cut off."""
    question = row.prompt.split("explanation in the answer. ")[-1]
    return str(rng.choice(SQL_FORMS)).format(q=question)


def code_question(row: Row, rng: np.random.Generator) -> str:
    """A programming task in another form, mostly without its test or longer text."""
    text = row.prompt.removeprefix("Please generate code based on the following doc:\n")
    if rng.random() < 0.7:
        text = re.split(r" Your code should satisfy|\n\s*\n", text)[0]
    if rng.random() < 0.2:
        return text
    return str(rng.choice(CODE_FORMS)).format(q=text)


def shell_question(row: Row, rng: np.random.Generator) -> str:
    """A tldr page's command or one of its tasks in another form."""
    command = row.prompt.split("`")[1] if row.prompt.count("`") >= 2 else row.prompt
    tasks = re.findall(r"^- (.+?):?$", row.response, re.MULTILINE)
    if tasks and rng.random() < 0.6:
        task = str(rng.choice(tasks)).rstrip(":")
        return str(rng.choice(SHELL_TASK_FORMS)).format(q=task[:1].lower() + task[1:])
    return str(rng.choice(SHELL_FORMS)).format(c=command)


def general_question(row: Row, rng: np.random.Generator) -> str:
    """The question or the text of a reading exercise alone, the text with another wish."""
    body, found, question = row.prompt.rpartition("Question: ")
    if not found:  # tables and dialogue: the last line is the question or the latest turn
        return row.prompt.rstrip().rsplit("\n", 1)[-1].removeprefix("Question:").strip()
    if rng.random() < 0.5:
        return question
    text = body.partition("\n\n")[2].strip() or body
    return str(rng.choice(READING_FORMS)).format(q=text)


def math_question(row: Row, rng: np.random.Generator) -> str:
    """A word problem in another form."""
    return str(rng.choice(MATH_FORMS)).format(q=row.prompt)


FORMS: dict[str, Form] = {
    "sql": sql_question,
    "code": code_question,
    "shell": shell_question,
    "math": math_question,
    GENERAL: general_question,
}


def general_prompts(rng: np.random.Generator, count: int) -> list[str]:
    """Self-written prompts of none of the topics."""
    made = []
    for _ in range(count):
        theme, other = rng.choice(GENERAL_THEMES, size=2, replace=False)
        role, second = rng.choice(ROLES, size=2, replace=False)
        made.append(
            str(rng.choice(GENERAL_FORMS)).format(
                t=theme, u=other, r=role, s=second, g=rng.choice(GENRES)
            )
        )
    return [*made, *GREETINGS]


def roughen(text: str, rng: np.random.Generator) -> str:
    """The text as a hurried person would type it, now and then."""
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.rstrip(".?! ")
    return text


def router_examples(rows: Sequence[Row], per_topic: int, seed: int) -> list[tuple[str, str]]:
    """Prompt and topic, for training: half in the rows' own form, half in others, shuffled."""
    rng = np.random.default_rng(seed)
    examples = []
    for topic in FORMS:
        own = [row for row in rows if row.topic == topic]
        for i in range(per_topic if own else 0):
            row = own[int(rng.integers(len(own)))]
            text = FORMS[topic](row, rng) if i % 2 else row.prompt
            examples.append((roughen(text, rng), topic))
    examples += [(roughen(text, rng), GENERAL) for text in general_prompts(rng, per_topic // 3)]
    return [examples[i] for i in rng.permutation(len(examples))]
