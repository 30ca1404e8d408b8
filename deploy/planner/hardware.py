"""Machines as a roofline sees them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.deploy.errors import ConfigError

_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, and how many of them share every layer.

    Attributes:
        name: for people.
        bandwidth: bytes/s of one accelerator's memory.
        flops: FLOP/s of one accelerator, dense, in the models' dtype.
        memory_bytes: of one accelerator; None is unknown.
        interconnect: bytes/s between accelerators, one direction.
        overhead_s: seconds per layer that neither bytes nor FLOPs explain (kernel starts and
            tails); embedding, head and sampling count as one layer more.
        reduce_latency_s: seconds that an all-reduce takes however little it carries.
        tensor_parallel: accelerators that share every layer.
        overlaps: whether arithmetic goes on while memory is read, as on a GPU with its many
            threads; on CPUs the two were measured to add up.
    """

    name: str
    bandwidth: float
    flops: float
    memory_bytes: float | None = None
    interconnect: float | None = None
    overhead_s: float = 0.0
    reduce_latency_s: float = 0.0
    tensor_parallel: int = 1
    overlaps: bool = True

    def __post_init__(self) -> None:
        """Refuse what no machine is.

        Raises:
            ConfigError: for a rate that is not positive, a negative time, or several
                accelerators without a link between them.
        """
        if not (self.bandwidth > 0.0 and self.flops > 0.0):
            raise ConfigError(f"{self.name}: memory bandwidth and FLOP/s must be positive")
        if self.overhead_s < 0.0 or self.reduce_latency_s < 0.0:
            raise ConfigError(f"{self.name}: overheads must not be negative")
        if self.tensor_parallel < 1:
            raise ConfigError("tensor parallel degree must be at least 1")
        if self.tensor_parallel > 1 and not (self.interconnect or 0.0) > 0.0:
            raise ConfigError(
                f"{self.name}: tensor parallelism needs the interconnect's bandwidth "
                "(--interconnect-gbs)"
            )


def _gpu(name: str, gbs: float, tflops: float, memory_gb: float, link_gbs: float) -> Hardware:
    """A GPU by its data sheet; both overheads are assumptions (replayed graphs, small messages)."""
    return Hardware(
        name,
        bandwidth=gbs * _GB,
        flops=tflops * _TERA,
        memory_bytes=memory_gb * _GB,
        interconnect=link_gbs * _GB,
        overhead_s=10.0 * _MICRO,
        reduce_latency_s=8.0 * _MICRO,
    )


# Data sheets: memory bandwidth, dense bf16 tensor FLOP/s, memory, link per direction (half of
# what is advertised for NVLink and PCIe). "cpu" is what docs/performance.md fits to two cores.
PRESETS = {
    "h100": _gpu("H100 SXM", 3350.0, 989.0, 80.0, 450.0),
    "h200": _gpu("H200 SXM", 4800.0, 989.0, 141.0, 450.0),
    "a100": _gpu("A100 SXM 80GB", 2039.0, 312.0, 80.0, 300.0),
    "l40s": _gpu("L40S", 864.0, 362.0, 48.0, 32.0),
    "cpu": Hardware("2 CPU cores", bandwidth=25.0 * _GB, flops=0.3 * _TERA, overlaps=False),
}
