"""Studies of learning on real prompts; ``benchmarks`` must be on the path."""
