"""Write the cards of a folder of models: what each is, from what, how, how good, and its hashes.

    python -m paceline.deploy.recipes.cards MODELS

``MODELS/figures.json`` holds the figures and the commands that made the models (`evaluate` writes
the former); the cards are made from it and from the files, so that neither can drift.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.deploy.recipes.checkpoints import sha256

FIGURES_FILE = "figures.json"
TOPICS = ("math", "code", "sql", "shell")
Card = Callable[[Mapping[str, Any]], str]

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


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


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


CARDS: Mapping[str, Card] = {"router": router_card}


def write_cards(models: Path, cards: Mapping[str, Card] = CARDS) -> None:
    """Write ``README.md`` into the folder of each model of the figures file.

    Args:
        models: folder of the figures file and of the models.
        cards: model to the text of its card without front matter and hashes, given its facts.

    Raises:
        FileNotFoundError: there is no figures file, or a model is missing.
        KeyError: the figures file lacks something that a card needs.
    """
    facts = json.loads((models / FIGURES_FILE).read_text())
    for name, own in facts.items():
        text = cards[name](own)
        (models / name / "README.md").write_text(f"{FRONT}\n{text}\n{hashes(models / name)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cards; see the module's text."""
    parser = argparse.ArgumentParser(prog="cards", description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path)
    write_cards(parser.parse_args(argv).models)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
