"""OpenVINO GenAI's continuous batching: plain, with prompt lookup, or with a draft model."""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from streaming import Job, serve


class Batching:
    """A pipeline and the thread that steps it.

    Args:
        pipeline: made.
        assistant: settings of a request's speculation.
    """

    def __init__(self, pipeline: Any, assistant: dict[str, int]) -> None:
        self._pipeline, self._assistant = pipeline, assistant
        self._numbers = itertools.count()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._handles: list[tuple[Job, Any]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Add a request to the batch."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            try:
                self._step()
            except Exception as error:
                for job, _ in self._handles:
                    job.tokens.put(error)
                self._handles.clear()

    def _step(self) -> None:
        while not self._handles or not self._jobs.empty():
            job = self._jobs.get()
            ids = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
            handle = self._pipeline.add_request(next(self._numbers), ids, self._config(job))
            self._handles.append((job, handle))
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for job, handle in list(self._handles):
            while handle.can_read():
                for output in handle.read().values():
                    if output.generated_ids:
                        job.tokens.put(list(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                job.tokens.put(None)
                self._handles.remove((job, handle))

    def _config(self, job: Job) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = job.max_tokens, True
        config.do_sample = job.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = job.temperature, 1.0
            config.rng_seed = next(self._numbers)
        for name, value in self._assistant.items():
            setattr(config, name, value)
        return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--draft", help="folder of a draft model")
    options = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = options.slots, 1  # GiB
    scheduler.enable_prefix_caching = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    assistant: dict[str, int] = {}
    if options.lookup:
        properties["prompt_lookup"] = True
        assistant = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    if options.draft:
        own = {"INFERENCE_NUM_THREADS": options.threads}
        properties["draft_model"] = genai.draft_model(options.draft, "CPU", **own)
        assistant = {"num_assistant_tokens": 4}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    serve(options.port, Batching(pipeline, assistant).submit, decode)


if __name__ == "__main__":
    main()
