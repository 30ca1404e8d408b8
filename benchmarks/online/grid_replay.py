"""The one logged replay that all cells of the grid learn from and are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from expert_cache import DRAFT, TARGET, base_hashes

from online.rows import Question, label, load, mark_of
from online.serving import FROZEN, ROWS, Serving, serve
from online.store import digest
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import Journal
from paceline.actors.router.policy import GENERAL

_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is answered; every second prompt is sampled, the others are greedy."""

    train: int = 600
    test: int = 200
    max_tokens: int = 96
    num_speculative_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Replay:
    """Records to learn from, and others, of other prompts, to judge by."""

    train: tuple[ReplayRecord, ...]
    test: tuple[ReplayRecord, ...]

    @property
    def prompts(self) -> str:
        """What stands for the prompts in settings."""
        return mark_of(
            Question(record.request_id, record.topic, tuple(record.prompt_token_ids.tolist()))
            for record in (*self.train, *self.test)
        )

    def facts(self) -> dict[str, Any]:
        """Counts, the draft's acceptance while it was logged, and what branches cost in bytes."""
        accepted = np.concatenate([record.accepted for record in self.train])
        sizes = [len(encode(record)) for record in self.train]
        plain = [len(encode(without_branches(record))) for record in self.train]
        behind = [r.branch_token_ids for r in self.train if r.branch_token_ids is not None]
        return {
            "records_train": len(self.train),
            "records_test": len(self.test),
            "positions": len(accepted),
            "positions_rejected": int((accepted == 0).sum()),
            "positions_behind_rejected": int(sum(map(len, behind))),
            "bytes_per_record": round(float(np.mean(plain))),
            "bytes_per_record_with_branches": round(float(np.mean(sizes))),
        }


def without_branches(record: ReplayRecord) -> ReplayRecord:
    """The record as it is where nothing behind rejected tokens is kept."""
    names = [name for name in ReplayRecord.__slots__ if name.startswith("branch_")]
    return replace(record, **dict.fromkeys(names, None))


def logged_replay(folder: Path, data: str | None, topic: str, sizes: Sizes, threads: int) -> Replay:
    """The topic's replay: the one on disk, else answered now and kept.

    Args:
        folder: of results.
        data: folder of rows, ``hf``, or None for the generator.
        topic: of the prompts.
        sizes: see Sizes.
        threads: of torch.

    Raises:
        paceline.deploy.recipes.data.DataError: the source lacks the topic, or is not there.
        RuntimeError: where the draft failed while it was logged.
    """
    mark = digest({"data": label(data), "sizes": asdict(sizes), "models": base_hashes()})
    paths = {part: folder / f"grid-{topic}-{part}-{mark}.records" for part in ("train", "test")}
    if not all(path.is_file() and path.stat().st_size for path in paths.values()):
        settings = TargetSettings(
            str(TARGET),
            drafts={GENERAL: str(DRAFT)},
            num_threads=threads,
            max_num_seqs=ROWS,
            num_speculative_tokens=sizes.num_speculative_tokens,
            replay_branches=True,
            seed=1,
        )
        engine, tokenizer, _ = build_engine(settings)
        questions = load(data, topic, tokenizer, train=sizes.train, test=sizes.test)
        for part, path in paths.items():
            records = _answered(engine, getattr(questions, part), sizes)
            Journal(path).rewrite(encode(record) for record in records)
    parts = {
        part: tuple(decode(entry) for entry in Journal(path).read()) for part, path in paths.items()
    }
    return Replay(**parts)


def _answered(engine: Any, questions: Sequence[Question], sizes: Sizes) -> list[ReplayRecord]:
    records = []
    for first, temperature in enumerate((0.0, _TEMPERATURE)):
        own = questions[first::2]
        serving = Serving(
            max_tokens=sizes.max_tokens,
            temperature=temperature,
            num_speculative_tokens=sizes.num_speculative_tokens,
        )
        records += [served.record for served in serve(engine, own, [FROZEN] * len(own), serving)]
    return records
