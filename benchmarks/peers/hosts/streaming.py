"""A small HTTP server for peers that have none: OpenAI's streamed completions of token ids.

Runs in the peers' own environments: the standard library alone.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Job:
    """A request, and its new tokens as they come; None ends them, an exception fails them."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    tokens: queue.SimpleQueue[Sequence[int] | Exception | None] = field(
        default_factory=queue.SimpleQueue
    )


def serve(port: int, submit: Callable[[Job], None], decode: Callable[[Sequence[int]], str]) -> None:
    """Answer ``POST /v1/completions`` until SIGTERM; the end of text is ignored, as is the model.

    Args:
        port: on loopback.
        submit: starts a job; called by any thread.
        decode: token ids to text.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            job = Job(body["prompt"], body["max_tokens"], body["temperature"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            submit(job)
            count = 0
            while (tokens := job.tokens.get()) is not None:
                if isinstance(tokens, Exception):
                    self._send({"error": {"message": f"{type(tokens).__name__}: {tokens}"}})
                    break
                count += len(tokens)
                choice = {"index": 0, "text": decode(tokens), "finish_reason": None}
                choices = [choice | {"token_ids": list(tokens)}]
                self._send({"object": "text_completion", "choices": choices})
            self._send({"choices": [], "usage": {"completion_tokens": count}})
            self._write(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, event: dict[str, Any]) -> None:
            self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def _write(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", port), Handler)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()


class OneAtATime:
    """Jobs in a thread, one after another: for generators that take a single prompt.

    Args:
        answer: runs a job, its tokens given to the function that it is called with.
    """

    def __init__(self, answer: Callable[[Job, Callable[[Sequence[int]], None]], None]) -> None:
        self._answer = answer
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._answer(job, job.tokens.put)
            except Exception as error:
                job.tokens.put(error)
            else:
                job.tokens.put(None)
