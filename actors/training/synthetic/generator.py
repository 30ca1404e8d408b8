"""The thread that imagines, in the first trainer's process: it asks the target, and waits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.actors.engine.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
    joined,
)
from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.training.synthetic.prompts import (
    beginning,
    imagined_prompt,
    to_answer,
    to_imagine,
)
from paceline.actors.training.synthetic.settings import ImaginationSettings

_WHOLE = (FINISH_STOP, FINISH_LENGTH)
_LONGEST_REST = 256  # ticks
_FULL = 0.95  # of the shard's part for imagined records


@dataclass(frozen=True, slots=True)
class Said:
    """What the target said to a request, and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str


class Sources(Protocol):
    """Where stored records are, and leave."""

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Topic to its shard's statistics, of those that answer."""

    def sample(self, topic: str, count: int, split: str) -> Iterable[ReplayRecord]:
        """At most so many records of a split."""

    def may_train(self) -> bool:
        """Whether serving is idle."""


class Voice(Protocol):
    """The target; records of what it says go where it sends them."""

    def say(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        """What it says to each, in this order."""


class Composer:
    """Imagines a few prompts at a time; :meth:`tick` for ever.

    A topic of which nothing comes rests, longer each time, so that the others have their turn and
    the target is not asked in vain for ever.

    ``counts``: prompts answered (``made``); texts ``unfinished``; stored prompts ``unsuited`` (not
    templated, or too short); imagined ones ``refused`` (one that judges, or too long); requests
    that ``yielded``.
    """

    def __init__(
        self, settings: ImaginationSettings, *, mark: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        """Nothing is imagined yet.

        Args:
            settings: see ImaginationSettings.
            mark: gives another name every time.
        """
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._mark = mark
        self._vain: Counter[str] = Counter()  # ticks in a row, by topic
        self._rests: dict[str, int] = {}  # ticks left
        self.counts: Counter[str] = Counter(made=0, unfinished=0, unsuited=0, refused=0, yielded=0)

    def lacks(self, sources: Sources) -> bool:
        """Whether any topic lacks imagined records."""
        return lacking(sources.stats(), self._settings)[0] is not None

    def tick(self, sources: Sources, voice: Voice) -> bool:
        """Imagine for the topic that lacks most; False where nothing came of it."""
        self._rests = {topic: left - 1 for topic, left in self._rests.items() if left > 1}
        topic, lacks = lacking(sources.stats(), self._settings, self._rests)
        if topic is None or not sources.may_train():
            return False
        yielded = self.counts["yielded"]
        made = self._imagine(topic, min(lacks, self._settings.at_once), sources, voice)
        self.counts["made"] += made
        if made:
            del self._vain[topic]
        elif yielded == self.counts["yielded"]:
            self._vain[topic] += 1
            self._rests[topic] = min(2 ** self._vain[topic], _LONGEST_REST)
        return made > 0

    def _imagine(self, topic: str, count: int, sources: Sources, voice: Voice) -> int:
        """Prompts that were imagined and answered."""
        begun = [
            (source, kept, self._mark())
            for source in sources.sample(topic, count, "train")
            if (kept := self._cut(source)) is not None
        ]
        said = self._say(
            voice, [to_imagine(s, kept, self._settings.marks, m) for s, kept, m in begun]
        )
        asked = []
        for (source, kept, mark), words in zip(begun, said, strict=True):
            if (request := self._question(source, kept, words, mark)) is not None:
                asked.append(request)
        if not asked or not sources.may_train():
            return 0
        return sum(answer.finish_reason in _WHOLE for answer in self._say(voice, asked))

    def _cut(self, source: ReplayRecord) -> tuple[int, ...] | None:
        kept = beginning(source.prompt_token_ids.tolist(), self._settings.marks, self._rng)
        self.counts["unsuited"] += kept is None
        return kept

    def _say(self, voice: Voice, requests: Sequence[GenerationRequest]) -> list[Said]:
        said = voice.say(requests) if requests else []
        self.counts["yielded"] += sum(each.finish_reason == FINISH_YIELDED for each in said)
        return said

    def _question(
        self, source: ReplayRecord, kept: tuple[int, ...], words: Said, mark: str
    ) -> GenerationRequest | None:
        """The request that answers an imagined prompt, if it is one."""
        if words.finish_reason not in _WHOLE:
            return None
        prompt = imagined_prompt(kept, words.token_ids, self._settings.marks)
        if prompt is None:
            self.counts["unfinished"] += 1
            return None
        ids = np.asarray(prompt, dtype=np.int32)
        judges = is_held_out(ids, self._settings.held_out_fraction)
        request = None if judges else to_answer(source, prompt, mark)
        self.counts["refused"] += request is None
        return request


def lacking(
    stats: Mapping[str, Mapping[str, Any]],
    settings: ImaginationSettings,
    resting: Container[str] = (),
) -> tuple[str | None, int]:
    """The topic that lacks most imagined records, and how many; None where none lacks any.

    Args:
        stats: topic to its shard's statistics. One whose part for imagined records is full lacks
            none, whatever their number.
        settings: see ImaginationSettings.
        resting: topics to leave out.
    """
    missing = {
        topic: int(settings.per_record * facts["records_train"]) - int(facts["records_imagined"])
        for topic, facts in stats.items()
        if topic not in resting
        and facts["records_train"] >= settings.least_records
        and facts["bytes_imagined"] < _FULL * facts["capacity_bytes_imagined"]
    }
    topic = max(missing, key=lambda name: missing[name], default=None)
    if topic is None or missing[topic] <= 0:
        return None, 0
    return topic, missing[topic]


logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LEAVE_EVERY_S = 0.1
_LONGEST_S = 120.0


class ServedTarget:
    """The target's deployment as a voice.

    Serve's handles may want to live in a running event loop: they have one of their own here.
    """

    def __init__(self, handle: Callable[[], Any], leave: Callable[[], bool]) -> None:
        """Nothing is asked yet.

        Args:
            handle: gives the deployment's handle; raises where it is not deployed yet.
            leave: whether serving is idle; asked again and again while anything is under way.
        """
        self._find, self._leave = handle, leave
        self._handle: Any = None
        self._events = asyncio.new_event_loop()
        name = "paceline-imagined"
        threading.Thread(target=self._events.run_forever, name=name, daemon=True).start()

    def say(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        """Ask for all at once, and drop all where leave is withdrawn, on whichever replica.

        Raises:
            TimeoutError: it takes longer than any answer should.
            Exception: any error of Ray's or of the replica's.
        """
        answers = asyncio.run_coroutine_threadsafe(self._all(requests), self._events)
        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            done, _ = futures.wait([answers], _LEAVE_EVERY_S)
            if done:
                return answers.result()
            if not self._leave():
                answers.cancel()
                return [Said((), FINISH_YIELDED)] * len(requests)
        answers.cancel()
        raise TimeoutError("the target does not answer")

    async def _all(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        if self._handle is None:
            self._handle = self._find().options(stream=True)
        async with asyncio.TaskGroup() as group:  # one that fails takes the others along
            tasks = [group.create_task(self._one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _one(self, request: GenerationRequest) -> Said:
        response = self._handle.generate.remote(request, True)
        try:
            chunks: list[GenerationChunk] = [chunk async for chunk in response]
        finally:
            response.cancel()  # of one that has ended it does nothing
        whole = joined(chunks) if chunks else GenerationChunk("", (), FINISH_ERROR)
        return Said(whole.token_ids, whole.finish_reason or FINISH_ERROR)


class Imaginer:
    """Imagines in a thread of its own, from construction to the process' end."""

    def __init__(
        self,
        settings: ImaginationSettings,
        shards: Mapping[str, Any],
        registry: Any,
        board: Any,
        target: Callable[[], Any],
    ) -> None:
        """Start the thread.

        Args:
            settings: see ImaginationSettings.
            shards: topic to actor handle of its ReplayShard.
            registry: actor handle of the WeightRegistry, which knows of added topics.
            board: actor handle of the LoadBoard; None always gives leave.
            target: see ServedTarget.
        """
        self._settings = settings
        self._handles = (dict(shards), registry, board)
        self._composer = Composer(settings)
        self._target = target
        self._failures = 0
        self._error: str | None = None
        threading.Thread(target=self._run, name="paceline-imaginer", daemon=True).start()

    def figures(self) -> dict[str, Any]:
        """Counts since the start, see Composer, ``failures``, and the last one's ``last_error``."""
        own = {"failures": self._failures, "last_error": self._error}
        return dict(self._composer.counts) | own

    def _run(self) -> None:
        from paceline.actors.training.trainer import lower_priority

        lower_priority()
        from paceline.actors.training.client import RayWorld

        shards, registry, board = self._handles
        world = RayWorld(shards, registry, board, self._settings.timeout_s)
        voice = ServedTarget(self._target, world.may_train)
        while True:
            try:
                world.added()
                if not self._composer.tick(world, voice):
                    time.sleep(self._settings.refresh_s)
            except Exception as error:
                self._failures += 1
                self._error = f"{type(error).__name__}: {error}"
                logger.info("nothing was imagined, trying again", exc_info=True)
                time.sleep(_RETRY_S)
