"""Acceptance of a draft by topic, on self-written prompts and on rows of a data folder.

    .venv/bin/python benchmarks/acceptance.py --data FOLDER

Greedy answers, eight at once, k drafted tokens in every round; rows are of the test side. Prints a
table in Markdown.
"""

from __future__ import annotations

import os
import sys

import torch
from decoding import Served
from harness import arguments, write
from models import find_models, load_engine
from prompts import MAX_PROMPT_TOKENS, measured_prompts, source_of

from paceline.deploy.demo.prompts import TOPICS


def main() -> int:
    """Measure and print."""
    usual = {"target": "smollm2", "threads": os.cpu_count() or 1}
    parser = arguments(__doc__, "target", "data", "threads", "out", **usual)
    parser.add_argument("--draft", default="auto", help="as drafts.general")
    parser.add_argument("--prompts", type=int, default=32, help="per topic")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, draft = find_models(options.target, options.draft)
    engine, tokenizer, _ = load_engine(
        {"general": str(draft)},
        threads=options.threads,
        target=target,
        max_num_seqs=8,
        max_model_len=MAX_PROMPT_TOKENS + options.max_tokens + 16,
    )
    served = Served("draft", engine, options.k, lambda _: "general")
    lines = ["| prompts | acceptance rate | mean acceptance length |", "|---|---|---|"]
    found = {}
    for data in dict.fromkeys((None, options.data)):
        for topic in TOPICS:
            prompts = measured_prompts(data, topic, tokenizer, options.prompts)
            drafted = served.run(prompts, 8, 0.0, options.max_tokens).drafted
            rate, length = drafted.acceptance_rate, drafted.mean_acceptance_length
            name = f"{topic}, {'self-written' if data is None else source_of(data)}"
            found[name] = {"acceptance_rate": rate, "mean_acceptance_length": length}
            lines.append(f"| {name} | {rate:.3f} | {length:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    settings = {"k": options.k, "prompts": options.prompts}
    write(options.out / "acceptance.json", settings | {"found": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
