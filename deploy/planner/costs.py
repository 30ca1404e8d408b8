"""Bytes, FLOPs and seconds of one forward."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.deploy.planner.hardware import Hardware
from paceline.deploy.planner.shapes import ModelShape

_LOGIT_BYTES = 4  # sampling works in float32


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number: in the weights, in the key/value cache, between the layers."""

    weight: float = 2.0
    kv: float = 2.0
    activation: float = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a forward moves and computes, over all accelerators.

    Attributes:
        weight_bytes: weights read, each once; of the experts those that are expected to be hit.
        kv_bytes: keys and values read and written.
        activation_bytes: what passes between the layers' kernels, written and read, and logits.
        product_flops: of the weights' products.
        attention_flops: of scores and weighted values.
        layers: decoder layers.
        kv_heads: by which the cache can be divided.
        reduced_bytes: what one all-reduce carries; a layer has two.
    """

    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    product_flops: float
    attention_flops: float
    layers: int
    kv_heads: int
    reduced_bytes: float

    @property
    def bytes_moved(self) -> float:
        """Everything that memory gives or takes."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def flops(self) -> float:
        """Everything that is computed."""
        return self.product_flops + self.attention_flops


def distinct_experts(count: int, per_token: int, tokens: int) -> float:
    """Experts of a layer that ``tokens`` tokens are expected to hit, routed uniformly."""
    return count * (1.0 - (1.0 - per_token / count) ** tokens)


def step_work(
    shape: ModelShape, precision: Precision, rows: int, tokens: int, context: int, copies: int = 1
) -> Work:
    """The work of a forward over ``rows`` requests with ``tokens`` new tokens each.

    Args:
        shape: the model.
        precision: bytes of a number.
        rows: requests; each reads its own keys and values, once for all its new tokens.
        tokens: new tokens of each.
        context: positions of each that are in the cache already.
        copies: models of this shape among which the rows are divided.
    """
    new = rows * tokens
    positions = shape.cached_positions(context)
    kv_of_layer = 2 * shape.kv_heads * shape.head_dim
    reads = rows * positions * kv_of_layer
    writes = new * shape.kv_values_per_token
    # A new token sees the cache, itself, and on average half of the others that are new.
    attended = new * (positions + shape.layers * (tokens + 1) / 2.0)
    return Work(
        weight_bytes=precision.weight * copies * _weights_read(shape, -(-new // copies)),
        kv_bytes=precision.kv * (reads + writes),
        activation_bytes=new * _activation_bytes(shape, precision),
        product_flops=2.0 * shape.active_parameters * new,
        attention_flops=4.0 * shape.heads * shape.head_dim * attended,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        reduced_bytes=precision.activation * new * shape.hidden,
    )


def _weights_read(shape: ModelShape, new: int) -> float:
    """Numbers of the weights that ``new`` tokens touch, rows of the embedding included."""
    read = float(shape.common_parameters + new * shape.hidden)
    if shape.experts:
        hit = distinct_experts(shape.experts.count, shape.experts.per_token, new)
        read += shape.experts.layers * hit * shape.expert_parameters
    return read


def _activation_bytes(shape: ModelShape, precision: Precision) -> float:
    """Of one token: what every kernel writes and the next one reads."""
    attention = 2 * shape.head_dim * (shape.heads + shape.kv_heads)  # q, k, v and the result
    dense = shape.layers - shape.sparse_layers
    fed = dense * shape.intermediate
    if shape.experts:
        width = shape.experts.per_token * shape.experts.intermediate
        fed += shape.experts.layers * (width + shape.experts.shared_intermediate)
    residual = 4 * shape.hidden  # two norms and the two sums behind them
    numbers = shape.layers * (attention + residual) + 3 * fed  # gate, up and their product
    return 2.0 * precision.activation * numbers + 2.0 * _LOGIT_BYTES * shape.vocab


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a forward by what they go to."""

    products_s: float
    attention_s: float
    reduce_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.products_s + self.attention_s + self.reduce_s + self.overhead_s


def step_time(work: Work, hardware: Hardware) -> StepTime:
    """The roofline, once for the weights' products and once for attention.

    The two follow each other in every layer: bytes of one do not hide FLOPs of the other.
    """
    shares = hardware.tensor_parallel
    moved = (work.weight_bytes + work.activation_bytes) / shares
    cache = work.kv_bytes / min(shares, work.kv_heads)  # heads are not divided, but repeated
    reduce_s = 0.0
    if shares > 1 and hardware.interconnect:
        carried = 2.0 * (shares - 1) / shares * work.reduced_bytes  # of a ring
        reduce_s = 2 * work.layers * (carried / hardware.interconnect + hardware.reduce_latency_s)
    return StepTime(
        products_s=_bound(moved, work.product_flops / shares, hardware),
        attention_s=_bound(cache, work.attention_flops / shares, hardware),
        reduce_s=reduce_s,
        overhead_s=(work.layers + 1) * hardware.overhead_s,
    )


def _bound(moved: float, flops: float, hardware: Hardware) -> float:
    """Seconds for bytes and FLOPs: the longer of the two, or their sum."""
    parts = (moved / hardware.bandwidth, flops / hardware.flops)
    return max(parts) if hardware.overlaps else sum(parts)
