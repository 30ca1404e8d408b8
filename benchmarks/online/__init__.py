"""Learning on real prompts, measured; ``benchmarks`` must be on the path."""
