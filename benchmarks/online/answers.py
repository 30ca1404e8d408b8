"""The target's answers with the frozen draft beside it, kept on disk: replay for whoever needs it.

One pass serves three ends: it is the frozen twin of an online stream, the lesson of an offline
ceiling, and a logged replay for anything else that learns or judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
from expert_cache import base_hashes

from online.rows import Question
from online.serving import FROZEN, Served, Serving, serve
from online.store import digest
from paceline.actors.engine.engine import Engine
from paceline.actors.replay.record import decode, encode
from paceline.actors.replay.shard import Journal

_PART = 128  # prompts between two of which the engine may be thrown away


def answers_of(
    folder: Path,
    name: str,
    questions: Sequence[Question],
    serving: Serving,
    engine: Callable[[], Engine],
    progress: Callable[[int], None] = lambda _: None,
    *,
    draft: str = FROZEN,
) -> list[Served]:
    """Every prompt answered by the target with one draft beside it, in the prompts' order.

    What the folder has is read, the rest is computed and kept as it comes: a killed run goes on.
    Their seconds compare with those of no other run: every part ends with few rows at work.

    Args:
        folder: of all answers.
        name: of these, for people, like ``rows-sql-train``.
        questions: the prompts; a longer list than last time only adds to it.
        serving: see Serving.
        engine: gives an idle engine; called only where something is missing.
        progress: told of every new answer.
        draft: the frozen general one, or ``off``, which is faster where that hardly helps.
    """
    journal = Journal(folder / f"{name}-{_mark(serving, draft)}.records")
    kept: dict[str, bytes] = {}
    for data in journal.read():
        kept[_key(data)] = data
    journal.rewrite(kept.values())  # a torn end would hide what is appended behind it
    missing = [q for q in questions if not _answers(kept.get(q.key), q)]
    for at in range(0, len(missing), _PART):
        part = missing[at : at + _PART]
        for served in serve(engine(), part, [draft] * len(part), serving):
            kept[served.key] = data = _pack(served)
            journal.append(data)
            progress(1)
    return [_unpack(kept[q.key], number) for number, q in enumerate(questions)]


def _mark(serving: Serving, draft: str) -> str:
    facts = {"serving": asdict(serving), "draft": draft, "models": base_hashes()}
    return digest(facts | {"seconds": "processor"})


def _pack(served: Served) -> bytes:
    fields = {
        name: getattr(served, name)
        for name in ("key", "rounds", "drafted", "accepted", "tokens", "seconds")
    }
    packed: bytes = msgpack.packb(fields | {"record": encode(served.record)})
    return packed


def _key(data: bytes) -> str:
    return str(msgpack.unpackb(data)["key"])


def _answers(data: bytes | None, question: Question) -> bool:
    """Whether this is the answer to that prompt, and not to one that once had its key."""
    return data is not None and _unpack(data, 0).record.prompt_token_ids.tolist() == [
        *question.token_ids
    ]


def _unpack(data: bytes, number: int) -> Served:
    fields: dict[str, Any] = msgpack.unpackb(data)
    return Served(number=number, **(fields | {"record": decode(fields["record"])}))
