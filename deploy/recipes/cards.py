"""Write the cards of a folder of models: what each is, from what, how, how good, and its hashes.

    python -m paceline.deploy.recipes.cards MODELS

``MODELS/figures.json`` holds the figures and the commands that made the models (`evaluate` writes
the former); the cards are made from it and from the files, so that neither can drift.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.deploy.recipes.checkpoints import sha256

FIGURES_FILE = "figures.json"
TOPICS = ("math", "code", "sql", "shell")

FRONT = """\
---
license: cc-by-sa-4.0
language: [en]
library_name: transformers
---
"""

NOTICES = """\
## Licence and notices

The weights are under Creative Commons Attribution-ShareAlike 4.0
(<https://creativecommons.org/licenses/by-sa/4.0/>), since some of the rows that they were made
from are share-alike. The rows themselves are not in this folder. They come from:

| rows | source | licence |
|---|---|---|
"""

SOURCES = {
    "gsm8k": "| math: GSM8K, train split | openai/grade-school-math, copyright 2021 OpenAI | MIT |",
    "spider": "| sql: Spider, train split | Yu et al. 2018, Yale LILY; questions as in "
    "ygan/Spider-Syn | CC BY-SA 4.0 |",
    "mbpp": "| code: MBPP, train and prompt splits | Austin et al. 2021, Google Research "
    "| CC BY 4.0 |",
    "cpython": "| code: documented functions of CPython's standard library | Python Software "
    "Foundation, copyright 2001 and later | PSF-2.0 |",
    "tldr": "| shell: tldr pages, English, own split by command | tldr-pages/tldr, its "
    "contributors | CC BY 4.0 |",
    "xquad": "| general: XQuAD, own split by article | google-deepmind/xquad | CC BY-SA 4.0 |",
    "xpersona": "| general: XPersona, English, validation split | HLTCHKUST/Xpersona | MIT |",
    "tatqa": "| general: TAT-QA, development split | NExTplusplus/TAT-QA | CC BY 4.0 |",
}
TEXT_SOURCES = ("gsm8k", "spider", "mbpp", "cpython", "tldr")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def by_topic(figures: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    """A table with a row for each topic; `names` maps a figure to its column's title."""
    rows = [
        [topic, *(f"{figures[topic][name]:.3f}" for name in names)]
        for topic in TOPICS
        if topic in figures
    ]
    return table(["topic", *names.values()], rows)


def hashes(folder: Path) -> str:
    """The sha256 of every file of a model but its card."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
    lines = "".join(f"{sha256(path)}  {path.name}\n" for path in files)
    return f"## sha256\n\n```\n{lines}```\n"


def recipe(commands: Sequence[str], notes: str) -> str:
    """How the model was made."""
    listing = "\n".join(commands)
    return f"## Recipe\n\n```\n{listing}\n```\n\n{notes}\n"


def notices(names: Sequence[str]) -> str:
    """Licence and sources."""
    return NOTICES + "".join(SOURCES[name] + "\n" for name in names)


def target_card(facts: Mapping[str, Any]) -> str:
    """The target's card, without front matter and hashes."""
    columns = {
        "loss": "loss per answer token (nats)",
        "looping": "looping answers",
        "endless": "answers not ended after 200 tokens",
        "either": "either",
    }
    parts = [
        "# Target\n\n16M parameters, Llama architecture: 8 layers, width 384, 6 heads, tied "
        "embeddings, context 1,024, byte-level BPE of 4,096 tokens (every digit a token), "
        "bfloat16. Prompt form, as its chat template has it: "
        "`<s><|user|>QUESTION<|assistant|>ANSWER</s>`.\n\nIt exists to be served and speculated "
        "on in a demonstration on two CPU cores: it writes the form of an answer (well-formed SQL, "
        "GSM8K-style solutions, tldr-style pages), and is mostly wrong on the matter.\n",
        "## Held-out figures\n\nLoss: the first 96 held-out rows of each topic. Shares: greedy "
        "answers to 40 held-out prompts of each topic; an answer loops when some 8 tokens in a row "
        "occur three times or more.\n\n" + by_topic(facts["figures"], columns),
    ]
    if "before" in facts:
        parts.append("Before the last part of the recipe:\n\n" + by_topic(facts["before"], columns))
    return "\n".join([*parts, recipe(facts["commands"], facts["notes"]), notices(facts["sources"])])


def draft_card(facts: Mapping[str, Any]) -> str:
    """The general draft's card, without front matter and hashes."""
    figures = facts["figures"]
    columns = {
        "expected_acceptance": "expected acceptance, sum of min(p, q)",
        "greedy_agreement": "greedy agreement",
    }
    return "\n".join(
        [
            "# Draft `general`\n\n1.8M parameters, Llama architecture: 1 layer, width 256, 4 "
            "heads, tied embeddings, the target's tokenizer, bfloat16. Distilled from the target "
            "on two of its four topics, math and code, so that sql and shell are a real shift "
            "when they come. Every topic's expert starts as its copy.\n",
            "## Held-out figures\n\nMeans over all positions of the target's greedy answers (at "
            "most 96 tokens) to 40 held-out prompts of each topic, at temperature 1, whole "
            "vocabulary.\n\n" + by_topic(figures, columns),
            f"One forward of one token costs {figures['step_cost_ratio']:.2f} of the target's "
            "(CPU, bfloat16, best of 40).\n",
            recipe(facts["commands"], facts["notes"]),
            notices(facts["sources"]),
        ]
    )


def router_card(facts: Mapping[str, Any]) -> str:
    """The router's card, without front matter and hashes."""
    titles = {
        "held_out": "held-out rows of the same sources",
        "demo_prompts": "self-written prompts of the demo, four topics, not trained on",
        "other_general": "Arena-Hard creative writing, Spec-Bench questions and texts: `general` "
        "from sources not trained on",
    }
    rows = [
        [title, fig["prompts"], f"{fig['accuracy']:.4f}", f"{fig['ece']:.4f}"]
        for name, title in titles.items()
        if (fig := facts["figures"].get(name))
    ]
    classes = facts["figures"]["held_out"]
    each = ", ".join(f"{name} {classes[f'accuracy_{name}']:.4f}" for name in (*TOPICS, "general"))
    return "\n".join(
        [
            "# Router\n\n1.0M parameters, `BertForSequenceClassification`: 2 layers, width 128, "
            "the target's tokenizer, first 128 tokens of a prompt, float32. Classes: math, code, "
            "sql, shell, and general for what is none of them. One temperature "
            "calibrates it; it is folded into the classifier's weights.\n",
            "## Held-out figures\n\n"
            + table(["prompts", "number", "accuracy", "calibration error (15 bins)"], rows),
            f"Held-out accuracy by class: {each}. What is far from all of its training text it "
            "may still call a topic with confidence: the last row of the table says how often.\n",
            recipe(facts["commands"], facts["notes"]),
            notices(facts["sources"]),
        ]
    )


CARDS = {"target": target_card, "draft-general": draft_card, "router": router_card}


def write_cards(models: Path) -> None:
    """Write ``README.md`` into the folder of each model of the figures file.

    Raises:
        FileNotFoundError: there is no figures file, or a model is missing.
        KeyError: the figures file lacks something that a card needs.
    """
    facts = json.loads((models / FIGURES_FILE).read_text())
    for name, own in facts.items():
        text = CARDS[name](own)
        (models / name / "README.md").write_text(f"{FRONT}\n{text}\n{hashes(models / name)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cards; see the module's text."""
    parser = argparse.ArgumentParser(prog="cards", description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path)
    write_cards(parser.parse_args(argv).models)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
