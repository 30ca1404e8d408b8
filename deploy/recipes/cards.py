"""Write the cards of a folder of models: what each is, from what, how, how good, and its hashes.

    python -m paceline.deploy.recipes.cards MODELS

``MODELS/figures.json`` holds the figures and the commands that made the models (the recipes print
the former); the cards are made from it and from the files, so that neither can drift.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES_FILE = "figures.json"
TOPICS = ("math", "code", "sql", "shell")
Card = Callable[[Mapping[str, Any]], str]

FRONT = """\
---
license: {licence}
language: [en]
---
"""


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def head_card(facts: Mapping[str, Any]) -> str:
    """The topic head's card, without front matter and hashes."""
    figures = facts["figures"]
    rows = [[name, f"{figures[name]:.3f}"] for name in (*TOPICS, "general")]
    return "\n".join(
        [
            "# Topic head\n\nA row per topic (math, code, sql, shell, and general for what is none "
            "of them) over the 384 features of sentence-transformers/all-MiniLM-L6-v2, a BERT of "
            "22.7M parameters that stays as it is: the first three of its six layers, mean "
            "pooling, first and last 24 tokens of a prompt. The encoder is not in this folder; "
            "`paceline models minilm` fetches it, `serve` does it too.\n",
            "## Cross-validated figures\n\nShare of the self-written prompts that go where they "
            "belong, by heads fitted without them, with `min_confidence` of config.json:\n\n"
            + table(["prompts", "right"], rows),
            f"Of the topics' prompts {figures['wrong_topic']:.3f} go to another topic, the rest to "
            "general. On rows that were not written for it: docs/learning.md.\n",
            recipe(facts["commands"], facts["notes"]),
            "## Licence\n\nApache-2.0: the prompts were written for it. The encoder is Apache-2.0 "
            "too, by the Sentence Transformers team.\n",
        ]
    )


CARDS: Mapping[str, Card] = {"router-minilm": head_card}


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
        front = FRONT.format(licence=own["licence"])
        (models / name / "README.md").write_text(f"{front}\n{text}\n{hashes(models / name)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cards; see the module's text."""
    parser = argparse.ArgumentParser(prog="cards", description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path)
    write_cards(parser.parse_args(argv).models)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
