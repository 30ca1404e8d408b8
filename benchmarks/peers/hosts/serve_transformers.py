"""Transformers: `generate`, assisted generation, or continuous batching."""

from __future__ import annotations

import argparse
import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from streaming import Job, OneAtATime, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

_PAGE = 32


class _Streamer(BaseStreamer):
    """Passes on what `generate` yields, without the prompt."""

    def __init__(self, emit: Callable[[Sequence[int]], None]) -> None:
        self._emit, self._begun = emit, False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self._emit(value.flatten().tolist())
        self._begun = True

    def end(self) -> None:
        pass


def configure(model: Any, job: Job) -> Any:
    """Generation config of a job; nothing ends an answer but its length."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.eos_token_id = job.max_tokens, None
    config.do_sample = job.temperature > 0
    if config.do_sample:
        config.temperature, config.top_k, config.top_p = job.temperature, 0, 1.0
    return config


def generator(model: Any, assistant: dict[str, Any]) -> OneAtATime:
    """`generate` with a streamer, which takes one prompt; ``assistant`` are its arguments."""

    @torch.inference_mode()
    def answer(job: Job, emit: Callable[[Sequence[int]], None]) -> None:
        ids = torch.tensor([job.prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=configure(model, job),
            streamer=_Streamer(emit),
            **assistant,
        )

    return OneAtATime(answer)


class Continuous:
    """Transformers' continuous batching; a manager per temperature, which it cannot mix.

    Args:
        model: with paged attention.
        slots: requests at once.
        context: tokens of each at most.
    """

    def __init__(self, model: Any, slots: int, context: int) -> None:
        self._model = model
        # Its default takes most of the machine's memory.
        self._pages = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=(slots + 1) * (context // _PAGE + 2),
            max_batch_tokens=max(256, slots),
        )
        self._lock = threading.Lock()
        self._manager: Any = None
        self._temperature: float | None = None
        self._numbers = itertools.count()
        self._jobs: dict[str, Job] = {}

    def submit(self, job: Job) -> None:
        """Add a request to the batch."""
        with self._lock:
            if self._temperature != job.temperature:
                self._restart(job)
            name = str(next(self._numbers))
            self._jobs[name] = job
            self._manager.add_request(
                job.prompt, name, job.max_tokens, streaming=True, eos_token_id=-1
            )

    def _restart(self, job: Job) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)
        config = configure(self._model, job)
        self._manager = self._model.init_continuous_batching(config, self._pages)
        self._manager.start()
        self._temperature = job.temperature
        threading.Thread(target=self._pass_on, args=(self._manager,), daemon=True).start()

    def _pass_on(self, manager: Any) -> None:
        """Give every request its results, until its manager ends."""
        sent: dict[str, int] = {}
        while manager is self._manager:
            result = manager.get_result(timeout=0.5)
            if result is None:
                continue
            name, job = result.request_id, self._jobs[result.request_id]
            if result.error is not None:
                job.tokens.put(RuntimeError(result.error))
                continue
            tokens = list(result.generated_tokens)[sent.get(name, 0) :]
            sent[name] = sent.get(name, 0) + len(tokens)
            if tokens:
                job.tokens.put(tokens)
            if result.is_finished():
                job.tokens.put(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--mode", choices=("generate", "lookup", "draft", "continuous"))
    parser.add_argument("--draft", help="folder of a draft model")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)

    def load(folder: str, attention: str = "sdpa") -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=attention, local_files_only=True
        ).eval()

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    submit: Callable[[Job], None]
    if options.mode == "continuous":
        submit = Continuous(
            load(options.model, "paged|sdpa"), options.slots, options.context
        ).submit
    else:
        assistant: dict[str, Any] = {}
        if options.mode == "lookup":
            assistant = {"prompt_lookup_num_tokens": 5}
        elif options.mode == "draft":
            assistant = {"assistant_model": load(options.draft)}
        submit = generator(load(options.model), assistant).submit
    serve(options.port, submit, tokenizer.decode)


if __name__ == "__main__":
    main()
