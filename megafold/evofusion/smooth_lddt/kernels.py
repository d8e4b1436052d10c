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
def _flags(flags, b, atoms, M):
    return tl.load(flags + b * M + atoms, mask=atoms < M, other=0) != 0


@triton.jit
def _atoms(pred, true, nucleotide, mask, b, atoms, M, HAS_MASK: tl.constexpr):
    """Predicted and true coordinates of atoms, whether they are nucleotides, and whether they count."""
    px, py, pz = _points(pred, b, atoms, M)
    tx, ty, tz = _points(true, b, atoms, M)
    keep = _flags(mask, b, atoms, M) if HAS_MASK else atoms < M
    return px, py, pz, tx, ty, tz, _flags(nucleotide, b, atoms, M), keep


@triton.jit
def _pairs(
    pred, true, nucleotide, mask, b, j, M, i, px, py, pz, tx, ty, tz, nucleotide_i, keep_i, nucleic_acid_cutoff,
    other_cutoff, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Of atoms i and j: predicted vectors [i, j], their length, true distance - length, and which pairs count."""
    qx, qy, qz, ux, uy, uz, nucleotide_j, keep_j = _atoms(pred, true, nucleotide, mask, b, j, M, HAS_MASK)
    dx, dy, dz = tx[:, None] - ux[None, :], ty[:, None] - uy[None, :], tz[:, None] - uz[None, :]
    distance = tl.sqrt_rn(dx * dx + dy * dy + dz * dz)
    both = nucleotide_i[:, None] & nucleotide_j[None, :]
    scored = distance < tl.where(both, nucleic_acid_cutoff, other_cutoff)
    scored = scored & keep_i[:, None] & keep_j[None, :] & (i[:, None] != j[None, :])
    dx, dy, dz = px[:, None] - qx[None, :], py[:, None] - qy[None, :], pz[:, None] - qz[None, :]
    length = tl.sqrt_rn(dx * dx + dy * dy + dz * dz)
    return dx, dy, dz, length, distance - length, scored


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
    px, py, pz, tx, ty, tz, nucleotide_i, keep_i = _atoms(pred, true, nucleotide, mask, b, i, M, HAS_MASK)
    total = tl.zeros([BLOCK_L], tl.float32)
    count = tl.zeros([BLOCK_L], tl.int32)
    for start in range(0, M, BLOCK_O):
        j = start + tl.arange(0, BLOCK_O)
        _, _, _, _, difference, scored = _pairs(
            pred, true, nucleotide, mask, b, j, M, i, px, py, pz, tx, ty, tz, nucleotide_i, keep_i,
            nucleic_acid_cutoff, other_cutoff, HAS_MASK,
        )  # fmt: skip
        # sigmoid(t - d) = 1 / (1 + exp(d) exp(-t)): one exponential for the four thresholds 0.5, 1, 2 and 4.
        e = tl.exp(tl.abs(difference))
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
    px, py, pz, tx, ty, tz, nucleotide_i, keep_i = _atoms(pred, true, nucleotide, mask, b, i, M, HAS_MASK)
    gx = tl.zeros([BLOCK_L], tl.float32)
    gy = tl.zeros([BLOCK_L], tl.float32)
    gz = tl.zeros([BLOCK_L], tl.float32)
    for start in range(0, M, BLOCK_O):
        j = start + tl.arange(0, BLOCK_O)
        dx, dy, dz, found, difference, scored = _pairs(
            pred, true, nucleotide, mask, b, j, M, i, px, py, pz, tx, ty, tz, nucleotide_i, keep_i,
            nucleic_acid_cutoff, other_cutoff, HAS_MASK,
        )  # fmt: skip
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
