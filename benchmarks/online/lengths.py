"""Whether acceptance falls within a long answer (arXiv 2605.09329).

    make bench-lengths ARGS="--data ../shared/data"

Agreement of the frozen draft with the target, teacher-forced, by the place in answers that reach
the limit: the same answers are in every bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from experts import prepare
from harness import bootstrap, interval, machine, parsed, show, write
from numpy.typing import NDArray
from prompts import HUB

from online.lab import Lab, Sizes, lab_arguments
from online.streams import mean, rounded

BIN = 80  # tokens
TOKENS = 5 * BIN  # of an answer; with a prompt of 112 tokens a record is cut
_PROMPT = 512 - TOKENS


def by_place(agreements: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """Share of agreement by answer and bin, ``[R, TOKENS / BIN]``, over all steps."""
    shares = [own.mean(axis=0).reshape(-1, BIN).mean(axis=1) for own in agreements]
    return np.array(shares).reshape(-1, TOKENS // BIN)


def summary(shares: NDArray[np.float64]) -> dict[str, Any]:
    """Mean of every bin, and the last bin's difference to the first, over answers."""
    return {
        "answers": len(shares),
        "bins": [rounded(bootstrap(mean, own)) for own in shares.T],
        "last_less_first": rounded(bootstrap(mean, shares[:, -1] - shares[:, 0])),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Answer, compare, write figures."""
    parser = lab_arguments(__doc__)
    parser.add_argument("--topics", nargs="+", help="chat, finance, code; without a folder code")
    parser.add_argument("--answers", type=int, default=48, help="per topic, long or not")
    options = parsed(parser, argv, answers=12)
    prepare(options.threads)
    lab, topics = Lab(options, replace(Sizes(), max_tokens=TOKENS)), {}
    known = ("code",) if options.data in (None, HUB) else ("chat", "finance", "code")
    for topic in options.topics or known:
        prompts = [p for p in lab.training_prompts(topic) if len(p.token_ids) <= _PROMPT]
        found = lab.records(f"{topic}-long", prompts[: options.answers])
        records = [record for record in found if len(record.output_token_ids) == TOKENS]
        if records:
            topics[topic] = summary(by_place(lab.evaluator.agreements(None, records)))
    settings = lab.run_settings(list(topics))
    figures = {"machine": machine(), "settings": settings, "topics": topics}
    write(options.out / "lengths.json", figures)
    names = [f"{start}-{start + BIN}" for start in range(0, TOKENS, BIN)]
    show(
        "Agreement by place in answers that reach the limit",
        [
            {"topic": topic, "answers": own["answers"]}
            | dict(zip(names, map(interval, own["bins"]), strict=True))
            | {"last less first": interval(own["last_less_first"])}
            for topic, own in topics.items()
        ],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
