"""Kernels of the smooth lDDT: all pairs of a block of atoms pass by in registers, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _points(points, b, atoms, M):
    """Coordinates of atoms of [B, M, 3]; 0 outside."""
    at = points + (b * M + atoms) * 3
    inside = atoms < M
    return (
        tl.load(at, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 1, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 2, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _scored(dx, dy, dz, i, j, nucleotide_i, nucleotide_j, keep_i, keep_j, nucleic_acid_cutoff, other_cutoff):
    """Distance in truth, and which pairs count."""
    distance = tl.sqrt_rn(dx * dx + dy * dy + dz * dz)
    both = nucleotide_i[:, None] & nucleotide_j[None, :]
    near = distance < tl.where(both, nucleic_acid_cutoff, other_cutoff)
    return distance, near & keep_i[:, None] & keep_j[None, :] & (i[:, None] != j[None, :])


@triton.jit
def _flags(flags, b, atoms, M):
    return tl.load(flags + b * M + atoms, mask=atoms < M, other=0) != 0


@triton.jit
def _bump(x):
    """s (1 - s) for s = 1 / (1 + x)."""
    s = 1.0 / (1.0 + x)
    return s * (1.0 - s)


@triton.jit
def score_kernel(
    pred, true, nucleotide, mask, sums, counts, M, blocks, nucleic_acid_cutoff, other_cutoff,
    HAS_MASK: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One program: sum of scores and number of pairs of BLOCK_L atoms with all; sums, counts [B, blocks]."""
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    i = (pid % blocks) * BLOCK_L + tl.arange(0, BLOCK_L)
    px, py, pz = _points(pred, b, i, M)
    tx, ty, tz = _points(true, b, i, M)
    nucleotide_i = _flags(nucleotide, b, i, M)
    keep_i = _flags(mask, b, i, M) if HAS_MASK else i < M
    total = tl.zeros([BLOCK_L], tl.float32)
    count = tl.zeros([BLOCK_L], tl.int32)
    for start in range(0, M, BLOCK_O):
        j = start + tl.arange(0, BLOCK_O)
        qx, qy, qz = _points(pred, b, j, M)
        ux, uy, uz = _points(true, b, j, M)
        keep_j = _flags(mask, b, j, M) if HAS_MASK else j < M
        distance, scored = _scored(
            tx[:, None] - ux[None, :], ty[:, None] - uy[None, :], tz[:, None] - uz[None, :], i, j, nucleotide_i,
            _flags(nucleotide, b, j, M), keep_i, keep_j, nucleic_acid_cutoff, other_cutoff,
        )  # fmt: skip
        dx, dy, dz = px[:, None] - qx[None, :], py[:, None] - qy[None, :], pz[:, None] - qz[None, :]
        difference = tl.abs(distance - tl.sqrt_rn(dx * dx + dy * dy + dz * dz))
        # sigmoid(t - d) = 1 / (1 + exp(d) exp(-t)): one exponential for the four thresholds 0.5, 1, 2 and 4.
        e = tl.exp(difference)
        score = 1.0 / (1.0 + e * 0.6065306597126334) + 1.0 / (1.0 + e * 0.36787944117144233)
        score += 1.0 / (1.0 + e * 0.1353352832366127) + 1.0 / (1.0 + e * 0.01831563888873418)
        total += tl.sum(tl.where(scored, 0.25 * score, 0.0), 1)
        count += tl.sum(scored.to(tl.int32), 1)
    tl.store(sums + pid, tl.sum(total, 0))
    tl.store(counts + pid, tl.sum(count, 0))


@triton.jit
def gradient_kernel(
    scale, pred, true, nucleotide, mask, grad, M, blocks, nucleic_acid_cutoff, other_cutoff,
    HAS_MASK: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of BLOCK_L atoms; a pair counts twice, as (i, j) and as (j, i). scale [B]."""
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    i = (pid % blocks) * BLOCK_L + tl.arange(0, BLOCK_L)
    px, py, pz = _points(pred, b, i, M)
    tx, ty, tz = _points(true, b, i, M)
    nucleotide_i = _flags(nucleotide, b, i, M)
    keep_i = _flags(mask, b, i, M) if HAS_MASK else i < M
    gx = tl.zeros([BLOCK_L], tl.float32)
    gy = tl.zeros([BLOCK_L], tl.float32)
    gz = tl.zeros([BLOCK_L], tl.float32)
    for start in range(0, M, BLOCK_O):
        j = start + tl.arange(0, BLOCK_O)
        qx, qy, qz = _points(pred, b, j, M)
        ux, uy, uz = _points(true, b, j, M)
        keep_j = _flags(mask, b, j, M) if HAS_MASK else j < M
        distance, scored = _scored(
            tx[:, None] - ux[None, :], ty[:, None] - uy[None, :], tz[:, None] - uz[None, :], i, j, nucleotide_i,
            _flags(nucleotide, b, j, M), keep_i, keep_j, nucleic_acid_cutoff, other_cutoff,
        )  # fmt: skip
        dx, dy, dz = px[:, None] - qx[None, :], py[:, None] - qy[None, :], pz[:, None] - qz[None, :]
        found = tl.sqrt_rn(dx * dx + dy * dy + dz * dz)
        difference = distance - found
        e = tl.exp(tl.abs(difference))
        slope = _bump(e * 0.6065306597126334) + _bump(e * 0.36787944117144233)
        slope += _bump(e * 0.1353352832366127) + _bump(e * 0.01831563888873418)
        # The score falls with |true - found|; two atoms at one place have no direction and no gradient.
        slope = tl.where(difference > 0.0, slope, tl.where(difference < 0.0, -slope, 0.0))
        slope = tl.where(scored & (found > 0.0), slope / tl.where(found > 0.0, found, 1.0), 0.0)
        gx += tl.sum(slope * dx, 1)
        gy += tl.sum(slope * dy, 1)
        gz += tl.sum(slope * dz, 1)
    factor = 0.5 * tl.load(scale + b)  # two halves of a pair, a quarter for each threshold
    at = grad + (b * M + i) * 3
    tl.store(at, gx * factor, mask=i < M)
    tl.store(at + 1, gy * factor, mask=i < M)
    tl.store(at + 2, gz * factor, mask=i < M)
