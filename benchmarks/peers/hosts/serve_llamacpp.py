"""llama.cpp's own server, from the package xllamacpp."""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of a slot")
    parser.add_argument("--speculative", help="the end of a common_speculative_type's name")
    parser.add_argument("--draft", help="GGUF file of a draft model")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames, params.port = ["127.0.0.1"], options.port
    params.n_parallel, params.n_ctx = options.slots, options.slots * options.context
    for pool in (params.cpuparams, params.cpuparams_batch):
        pool.n_threads = options.threads
    if options.speculative:
        kind = f"COMMON_SPECULATIVE_TYPE_{options.speculative}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    if options.draft:
        params.speculative.draft.mparams.path = options.draft
        for pool in (params.speculative.draft.cpuparams, params.speculative.draft.cpuparams_batch):
            pool.n_threads = options.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)  # noqa: T201
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
