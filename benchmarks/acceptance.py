"""Acceptance of drafts by topic, on self-written prompts and on rows of a data folder.

    .venv/bin/python benchmarks/acceptance.py --data FOLDER --drafts auto FOLDER

Greedy answers, eight at once, k drafted tokens in every round; rows are of the test side. Prints a
table in Markdown.
"""

from __future__ import annotations

import os
import sys

import torch
from decoding import Served
from harness import arguments, machine, write, written
from models import find_models, load_engine
from prompts import MAX_PROMPT_TOKENS, measured_prompts, source_of

from paceline.deploy.demo.prompts import TOPICS


def main() -> int:
    """Measure and print."""
    usual = {"target": "smollm2", "threads": os.cpu_count() or 1}
    parser = arguments(__doc__, "target", "data", "threads", "out", **usual)
    parser.add_argument("--drafts", nargs="+", default=["auto"], help="as drafts.general")
    parser.add_argument("--prompts", type=int, default=32, help="per topic")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folders = [find_models(options.target, draft) for draft in options.drafts]
    names = ["general", *(f"other-{number}" for number in range(1, len(folders)))]
    engine, tokenizer, _ = load_engine(
        dict(zip(names, (str(draft) for _, draft in folders), strict=True)),
        threads=options.threads,
        target=folders[0][0],
        max_num_seqs=8,
        max_model_len=MAX_PROMPT_TOKENS + options.max_tokens + 16,
    )
    lines = [
        f"| prompts | {' | '.join(f'{d}: rate, mean length' for d in options.drafts)} |",
        "|---" * (1 + len(names)) + "|",
    ]
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for data in dict.fromkeys((None, options.data)):
        for topic in TOPICS:
            prompts = measured_prompts(data, topic, tokenizer, options.prompts)
            own = found[f"{topic}, {'self-written' if data is None else source_of(data)}"] = {}
            for draft, name in zip(options.drafts, names, strict=True):
                served = Served(draft, engine, options.k, lambda _, name=name: name)  # type: ignore[misc]
                drafted = served.run(prompts, 8, 0.0, options.max_tokens).drafted
                own[draft] = {
                    "acceptance_rate": drafted.acceptance_rate,
                    "mean_acceptance_length": drafted.mean_acceptance_length,
                }
    for name, own in found.items():
        cells = [
            f"{d['acceptance_rate']:.3f}, {d['mean_acceptance_length']:.2f}" for d in own.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    figures = {"machine": machine(), "settings": written(options), "found": found}
    write(options.out / "acceptance.json", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
