"""Acceptance of a draft by topic, on self-written prompts and on rows of a data folder.

    .venv/bin/python benchmarks/acceptance.py --target smollm2 --data FOLDER

Greedy answers, eight at once, k drafted tokens in every round; rows are of the test side. Prints a
table in Markdown.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from decoding import Served, load_engine
from harness import arguments, say, write
from prompts import MAX_PROMPT_TOKENS, bench_texts, encode

from paceline.actors.engine.model_loader import load_tokenizer
from paceline.deploy.config.config import load_config
from paceline.deploy.draft_store import fetch_models


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="smollm2", help="as target.path")
    parser.add_argument("--draft", default="auto", help="as drafts.general")
    parser.add_argument("--data", type=Path, help="folder of rows")
    parser.add_argument("--prompts", type=int, default=32, help="per topic")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/bench/acceptance.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    named = {"target.path": options.target, "drafts.general": options.draft}
    config = fetch_models(load_config(None, named), say)
    texts = {f"{topic}, self-written": own for topic, own in bench_texts().items()}
    if options.data is not None:
        texts |= {f"{topic}, rows": own for topic, own in bench_texts(options.data).items()}
    prompts = encode(load_tokenizer(config.target_path), texts)
    engine, _, _ = load_engine(
        {"general": str(config.draft_paths["general"])},
        threads=options.threads,
        target=config.target_path,
        max_num_seqs=8,
        max_model_len=MAX_PROMPT_TOKENS + options.max_tokens + 16,
    )
    served = Served("draft", engine, options.k, lambda _: "general")
    lines = ["| prompts | acceptance rate | mean acceptance length |", "|---|---|---|"]
    found = {}
    for name, own in prompts.items():
        run = served.run(own[: options.prompts], 8, 0.0, options.max_tokens)
        rate, length = run.drafted.acceptance_rate, run.drafted.mean_acceptance_length
        found[name] = {"acceptance_rate": rate, "mean_acceptance_length": length}
        lines.append(f"| {name} | {rate:.3f} | {length:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    write(options.out, {"k": options.k, "prompts": options.prompts, "found": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
