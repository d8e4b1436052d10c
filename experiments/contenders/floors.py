"""What no implementation can beat: the bytes that must move and the operations that must be done, and the time of each.

Inputs are read once and outputs written once in each pass, matrix operands that a library's product needs are written
and read, and what a backward must have again is counted once more. Times are those of an NVIDIA H200, with ceilings
measured on one: a copy, a large bf16 product, exponentials. On another device only their ratios mean anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.record import Metric

BYTES_A_SECOND = 4.2e12
FLOPS_A_SECOND = 717e12
SPECIALS_A_SECOND = 4.2e12
"""Exponentials, square roots, reciprocals."""

COPIES = 48
"""Augmentations of a structure in the diffusion module."""


@dataclass(frozen=True)
class Pass:
    """One pass: bytes moved, floating-point operations of matrix products, special functions."""

    bytes: float
    flops: float = 0.0
    specials: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.bytes + other.bytes, self.flops + other.flops, self.specials + other.specials)

    @property
    def seconds(self) -> float:
        """The largest of the three times on an H200."""
        return max(self.bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND, self.specials / SPECIALS_A_SECOND)


@dataclass(frozen=True)
class Floor:
    """The forward, and forward + backward."""

    forward: Pass
    both: Pass

    def metrics(self) -> dict[str, Metric]:
        """As a Record holds it."""
        text = "the largest of bytes at 4.2 TB/s, products at 717 TFLOP/s and special functions at 4.2e12/s (one H200)"
        return {
            "floor_forward_time": Metric(self.forward.seconds, "s", definition=text),
            "floor_forward_backward_time": Metric(self.both.seconds, "s", definition=text),
            "floor_bytes": Metric(self.both.bytes, "B", definition="least traffic of forward + backward"),
            "floor_flops": Metric(self.both.flops, "FLOP", definition="products of forward + backward"),
        }


def attention_floor(
    batch: int, rows: int, heads: int, length: int, dim: int, item: int = 2, bias_item: int = 2
) -> Floor:
    """Triangle attention: two products forward; in the backward scores and exponentials again, and four products."""
    tensor = batch * rows * heads * length * dim * item
    bias = batch * heads * length * length * bias_item
    scores = batch * rows * heads * length * length
    product = 2 * scores * dim
    forward = Pass(4 * tensor + bias, 2 * product, scores)
    return Floor(forward, forward + Pass(8 * tensor + 2 * bias, 5 * product, scores))


def operator_floor(workload: str, n: int, item: int = 2) -> Floor:
    """An EvoFusion operator at n tokens, in the shapes of the paper's model."""
    return _FLOORS[workload](n, item)


def _rows(rows: float, width: int, read_write: tuple[float, float], units: tuple[float, float], item: int) -> Floor:
    """Rows of one width: tensors moved and products [rows, width] x [width, width], forward and backward."""
    tensor, unit = rows * width * item, 2 * rows * width * width
    forward = Pass(read_write[0] * tensor, units[0] * unit)
    return Floor(forward, forward + Pass(read_write[1] * tensor, units[1] * unit))


def _triangle_multiplication(n: int, item: int) -> Floor:
    # Forward: x; operands out, in; product out, in; x again; y: 9. Backward: operands out and in twice, gradients of
    # the product and of the operands out and in, x three times, product, d(y) twice, d(x): 18.
    floor = _rows(n * n, 128, (9, 18), (6, 18), item)
    product = Pass(0.0, 2.0 * n**3 * 128)
    return Floor(floor.forward + product, floor.both + Pass(0.0, 3 * product.flops))


def _windowed_attention(n: int, item: int) -> Floor:
    atoms, heads, dim, window = 8 * n, 4, 64, 27
    tensor = COPIES * atoms * heads * dim * item
    scores = COPIES * atoms * heads * 2 * window
    forward = Pass(4 * tensor + scores * item, 4 * scores * dim, scores)
    return Floor(forward, forward + Pass(8 * tensor + 2 * scores * item, 10 * scores * dim, scores))


def _conditioned_tokens(n: int, item: int) -> Floor:
    rows, width, depth = COPIES * n, 768, 801
    flops = 2 * rows * (3 * width * depth + 6 * width * width)
    tensors = rows * item * (2 * width + depth), rows * item * (3 * width + 2 * depth)
    forward = Pass(tensors[0], flops)
    return Floor(forward, forward + Pass(tensors[1], 2 * flops))


def _outer_product_mean(n: int, item: int) -> Floor:
    depth, hidden, width, msa = 512, 32, 128, 64
    outer, project = 2 * n * n * depth * hidden**2, 2 * n * n * hidden**2 * width
    tensors = depth * n * msa * item, n * n * width * item
    forward = Pass(sum(tensors), outer + project)
    return Floor(forward, forward + Pass(2 * tensors[0] + tensors[1], 3 * outer + 2 * project))


def _pair_weighted_averaging(n: int, item: int) -> Floor:
    depth, inner, width, msa, heads = 512, 256, 128, 64, 8
    averaged = 2 * n * n * depth * inner
    projections = 2 * depth * n * msa * inner * 3
    tensors = depth * n * msa * item, n * n * width * item
    forward = Pass(2 * tensors[0] + tensors[1], averaged + projections, heads * n * n)
    backward = Pass(3 * tensors[0] + 2 * tensors[1], 2 * averaged + 3 * projections, heads * n * n)
    return Floor(forward, forward + backward)


def _smooth_lddt(n: int, item: int) -> Floor:
    # Two square roots, an exponential and four reciprocals a pair.
    coordinates, specials = COPIES * 8 * n * 3 * 4, 7.0 * COPIES * (8 * n) ** 2
    return Floor(Pass(2 * coordinates, 0.0, specials), Pass(5 * coordinates, 0.0, 2 * specials))


_FLOORS = {
    "triangle_multiplication": _triangle_multiplication,
    "transition": lambda n, item: _rows(n * n, 128, (2, 3), (6, 16), item),
    "norm_project": lambda n, item: _rows(n * n, 128, (5, 6), (4, 8), item),
    "attention_output": lambda n, item: _rows(n * n, 128, (4, 5), (1, 2), item),
    "conditioned_transition_atoms": lambda n, item: _rows(COPIES * 8 * n, 128, (3, 5), (9, 27), item),
    "conditioned_transition_tokens": _conditioned_tokens,
    "windowed_attention": _windowed_attention,
    "outer_product_mean": _outer_product_mean,
    "pair_weighted_averaging": _pair_weighted_averaging,
    "smooth_lddt": _smooth_lddt,
}
OPERATORS = tuple(_FLOORS)
