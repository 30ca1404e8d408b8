"""Learning on real prompts, measured: streams, ceilings, shifts, cost.

The parts import each other as ``online.part`` and the older benchmarks by their bare names, so
``benchmarks`` must be on the path:

    PYTHONPATH=benchmarks python -m online --quick
"""
