"""Host side of the transition: one kernel where a program holds a row and its products, else the vendor's products.

The narrow backward goes through the rows in chunks, which bounds the gradients of the wide intermediate that it stores
for the weights' gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion import rows as row_kernels
from megafold.evofusion.launch import (
    EPS,
    block,
    ceil_div,
    configuration,
    hopper_kernels,
    options,
    round_up,
)
from megafold.evofusion.norm_project.launch import input_gradient, takes_transposed
from megafold.evofusion.operator import is_narrow
from megafold.evofusion.rows import padded
from megafold.evofusion.transition import kernels
from megafold.evofusion.vendor_product import multiply
from megafold.evofusion.weight_finish import Part, gradients
from megafold.evofusion.weight_gradient import Rows, Term, add_together, by_rows, product_over_rows, runs_together
from megafold.evofusion.weights import PLAIN, TRANSPOSED, prepared
from megafold.replay import launch_kernel

RESIDENT_BYTES = 3 << 16
"""Largest weights that a program keeps in shared memory."""

CHUNK_ELEMENTS = 1 << 28
"""Most elements of the intermediate's gradients at once: 512 MiB in 16-bit."""


def forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    in_weight: Tensor,
    out_weight: Tensor,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The output, and for the wide backward values and gates [M, 2 I] (without elements in the narrow one)."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=x.dtype if residual else dtype)
    with triton_support.device_guard(x.device):
        if is_wide(x, in_weight):
            return out, _wide_forward(x, norm_weight, norm_bias, in_weight, out_weight, residual, dtype, out)
        config, constants = _narrow("transition", x, norm_weight, in_weight, dtype)
        rows = x.numel() // x.shape[-1]
        pointers = (x, *_vectors(x, norm_weight, norm_bias), *prepared(dtype, in_weight, out_weight), out)
        wide = out_weight.shape[1] == 2 * x.shape[-1]
        hopper = hopper_kernels(config, x, dtype, *pointers[3:5]) if wide else None
        if hopper:
            flat = x.view(rows, -1), *pointers[1:5], out.view(rows, -1)
            hopper.transition(*flat, norm_weight is not None, residual, **config["gluon"])
            return out, x.new_empty(0, dtype=dtype)
        launch_kernel(
            kernels.transition_kernel, (ceil_div(rows, config["block_l"]),),
            *pointers, rows, in_weight.shape[0] // 2, EPS, RESIDUAL=residual, **constants, **options(config),
        )  # fmt: skip
    return out, x.new_empty(0, dtype=dtype)


def backward(
    grad_out: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    in_weight: Tensor,
    out_weight: Tensor,
    pre: Tensor,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x and the four parameters; without elements for those of a LayerNorm that is not there."""
    x, grad_out = x.contiguous(), grad_out.contiguous()
    run = _wide_backward if is_wide(x, in_weight) else _narrow_backward
    with triton_support.device_guard(x.device):
        grad_x, parts, of_out = run(grad_out, x, norm_weight, norm_bias, in_weight, out_weight, pre, residual, dtype)
        if norm_weight is None and of_out is not None:
            grads, norms = [parts[0].products[0].contiguous().to(in_weight.dtype)], None
        else:
            found = gradients(parts, norm_weight, norm_bias)
            grads, norms = found.weights, found.norms
    grad_gamma, grad_beta = norms or (x.new_empty(0), x.new_empty(0))
    if of_out is not None:
        grads.append(of_out.contiguous().to(out_weight.dtype))
    return grad_x, grad_gamma, grad_beta, *grads


def is_wide(x: Tensor, in_weight: Tensor) -> bool:
    """Whether the vendor's products do it: rows too wide, or an intermediate that blocks do not divide."""
    return not is_narrow(x.shape[-1]) or (in_weight.shape[0] // 2) % 16 != 0


def _narrow(
    kernel: str, x: Tensor, norm_weight: Tensor | None, in_weight: Tensor, dtype: torch.dtype
) -> tuple[dict, dict]:
    config = configuration(kernel, dtype, x.device)
    constants = {
        "C": x.shape[-1],
        "BLOCK_L": config["block_l"],
        "BLOCK_O": block(config, "block_o", in_weight.shape[0] // 2),
        "NORM": norm_weight is not None,
        "FAST": triton_support.takes_ptx(x.device),
        "PRECISION": triton_support.float32_precision(),
    }
    return config, constants


def _launch_gradient(pointers: tuple[Tensor, ...], rows: int, inner: int, config: dict, constants: dict) -> None:
    """One program a tile, or, where a configuration asks for it and they fit, one a multiprocessor with all weights."""
    tiles, constants, width = ceil_div(rows, config["block_l"]), constants | options(config), constants["C"]
    size = 3 * inner * width * pointers[4].element_size()
    if config.get("resident") and inner & (inner - 1) == 0 and inner >= 32 and size <= RESIDENT_BYTES:
        programs = min(tiles, triton_support.multiprocessors(pointers[0].device))
        del constants["BLOCK_O"]
        constants |= {"STAGES": config["num_stages"], "INNER": inner}
        launch_kernel(kernels.resident_gradient_kernel, (programs,), *pointers, rows, tiles, programs, EPS, **constants)
    else:
        launch_kernel(kernels.gradient_kernel, (tiles,), *pointers, rows, inner, EPS, **constants)


def _vectors(x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (x, x) if norm_weight is None else (norm_weight, norm_bias)


def _narrow_backward(grad_out, x, norm_weight, norm_bias, in_weight, out_weight, pre, residual, dtype):
    width, inner = x.shape[-1], in_weight.shape[0] // 2
    x_rows, grad_rows = x.view(-1, width), grad_out.view(-1, width)
    count = x_rows.shape[0]
    chunks = ceil_div(3 * inner * count, CHUNK_ELEMENTS)
    chunk = ceil_div(count, chunks)
    chunks = ceil_div(count, chunk)
    grad_x, norm = torch.empty_like(x), norm_weight is not None
    config, constants = _narrow("transition_gradient", x, norm_weight, in_weight, dtype)
    fits = inner == 2 * width and grad_out.dtype == x.dtype
    hopper = hopper_kernels(config, x, dtype, grad_out, in_weight) if fits else None
    transposed = norm and takes_transposed(x, 2 * inner, dtype)
    w_in, w_out, *w_in_transposed = prepared(
        dtype, in_weight, (out_weight, TRANSPOSED if hopper else PLAIN), *[(in_weight, TRANSPOSED)] * transposed
    )
    w_through = w_in_transposed[0] if transposed else w_in
    hidden = x.new_empty((chunk, inner), dtype=dtype)
    grads = x.new_empty((chunk, 2 * inner), dtype=dtype)
    copies = grad_out.dtype != dtype
    above = x.new_empty((chunk, width), dtype=dtype) if copies else grad_rows
    normed = x.new_empty((chunk, width), dtype=dtype) if norm else x_rows
    joint = runs_together(dtype, x.device)
    of_in = Rows(1, 1, chunk, 2 * inner, width, x.device, dtype, shares=chunks, beside=inner if joint else 0)
    of_out = Rows(1, 1, chunk, inner, width, x.device, dtype, shares=chunks, splits=of_in.splits) if joint else []
    for share in range(chunks):
        part = slice(share * chunk, min(count, (share + 1) * chunk))
        size = part.stop - part.start
        source, upstream = normed if norm else x_rows[part], above if copies else grad_rows[part]
        vectors = _vectors(x, norm_weight, norm_bias)
        pointers = (grad_rows[part], x_rows[part], *vectors, w_in, w_out, hidden, grads, upstream)
        if hopper:
            hopper.transition_gradient(*pointers, norm, copies, **config["gluon"])
        else:
            _launch_gradient(pointers, size, inner, config, constants | {"COPY": copies})
        other = grad_rows[part] if residual else None
        grad_rows_x = grad_x.view(-1, width)[part]
        if norm:
            input_gradient(grads[:size], x_rows[part], norm_weight, w_through, transposed, other, grad_rows_x, normed)
        elif other is None:
            _multiply(grads[:size], w_in, grad_rows_x)
        else:
            torch.add(other, grads[:size] @ w_in, out=grad_rows_x)
        if joint:
            term = Term(of_in, by_rows(grads), by_rows(source), 2 * inner, sums=norm)
            add_together(term, Term(of_out, by_rows(hidden), by_rows(upstream), inner, sums=False), share, size)
        else:
            of_in.add(by_rows(grads), by_rows(source), 2 * inner, share=share, length=size, sums=norm)
            of_out.append(product_over_rows(hidden[:size], upstream[:size]))
    if joint:
        last = of_out.part(out_weight, normed=False, turned=True)
    else:
        # Shares of the chunks. No sums: nothing reads them.
        products = of_out[0][None] if chunks == 1 else torch.stack(of_out)
        last = Part(out_weight, products, products[..., 0], normed=False, turned=True)
    return grad_x, [of_in.part(in_weight, normed=norm), last], None


def _wide_weights(in_weight: Tensor, out_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and gates [2 I, C], and [C, I], with C and I filled up to a multiple of 16."""
    width, inner = out_weight.shape
    full_width, full_inner = round_up(width), round_up(inner)
    if full_inner == inner:
        return padded(in_weight, dtype, columns=full_width), padded(out_weight, dtype, rows=full_width)
    halves = [padded(half, dtype, rows=full_inner, columns=full_width) for half in in_weight.chunk(2)]
    return torch.cat(halves), padded(out_weight, dtype, rows=full_width, columns=full_inner)


def _wide_input(x: Tensor, norm: bool, dtype: torch.dtype) -> Tensor:
    """(x - mean) / std, or x, as rows [M, C] padded to a multiple of 16."""
    flat = x.view(-1, x.shape[-1])
    if norm:
        return row_kernels.normalized(flat, dtype)[0]
    return padded(flat, dtype, columns=round_up(x.shape[-1]))


def _wide_forward(x, norm_weight, norm_bias, in_weight, out_weight, residual, dtype, out):
    width, norm = x.shape[-1], norm_weight is not None
    w_in, w_out = _wide_weights(_scaled(in_weight, norm_weight), out_weight, dtype)
    source = _wide_input(x, norm, dtype)
    if norm:
        shift = (in_weight.float() * norm_bias.float()).sum(1).to(dtype)
        shift = torch.cat(
            [torch.nn.functional.pad(half, (0, w_in.shape[0] // 2 - half.shape[0])) for half in shift.chunk(2)]
        )
        pre = torch.addmm(shift, source, w_in.mT)
    else:
        pre = source @ w_in.mT
    hidden = _swiglu(pre)
    flat, out = x.view(-1, width), out.view(-1, width)
    if residual:
        torch.add(flat, (hidden @ w_out.mT)[:, :width], out=out)
    else:
        _multiply(hidden, w_out.mT, out)
    return pre


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The first columns of a @ b, as many as ``out`` has, in its dtype: at once where it has all and that of a."""
    if out.dtype == a.dtype and out.shape[1] == b.shape[1]:
        multiply(a[None], b[None], out=out[None])
    else:
        out.copy_((a @ b)[:, : out.shape[1]])


def _scaled(weight: Tensor, gamma: Tensor | None) -> Tensor:
    """The weight with the LayerNorm's scale in it, in fp32: the normalised rows alone are then what it multiplies."""
    return weight if gamma is None else weight.float() * gamma.float()


def _swiglu(pre: Tensor) -> Tensor:
    rows, inner = pre.shape[0], pre.shape[1] // 2
    hidden = pre.new_empty((rows, inner))
    launch_kernel(
        row_kernels.swiglu_kernel, (ceil_div(rows, 4), ceil_div(inner, 512)),
        pre, hidden, rows, inner, BLOCK_L=4, BLOCK_C=512, num_warps=4,
    )  # fmt: skip
    return hidden


def _wide_backward(grad_out, x, norm_weight, norm_bias, in_weight, out_weight, pre, residual, dtype):
    (width, inner), norm = out_weight.shape, norm_weight is not None
    w_in, w_out = _wide_weights(_scaled(in_weight, norm_weight), out_weight, dtype)
    flat, upstream = x.view(-1, width), padded(grad_out.view(-1, width), dtype, columns=w_out.shape[0])
    grad_hidden = upstream @ w_out
    grad_pre, hidden = torch.empty_like(pre), torch.empty_like(grad_hidden)
    rows, full = hidden.shape
    launch_kernel(
        row_kernels.swiglu_gradient_kernel, (ceil_div(rows, 4), ceil_div(full, 512)),
        pre, grad_hidden, grad_pre, hidden, rows, full, BLOCK_L=4, BLOCK_C=512, num_warps=4,
    )  # fmt: skip
    grad_out_weight = (upstream.mT @ hidden)[:width, :inner]
    source = _wide_input(x, norm, dtype)
    products = grad_pre.mT @ source
    if products.shape != in_weight.shape:
        products = torch.cat([half[:inner, :width] for half in products.chunk(2)])
    sums = products  # read by the gradients of a LayerNorm alone
    if norm:
        sums = torch.cat([half[:inner] for half in grad_pre.sum(0, dtype=torch.float32).chunk(2)])
        products = products.float()
    of_in = Part(in_weight, products[None], sums[None], norm)
    grad = grad_pre @ w_in
    if norm:
        grad_x = row_kernels.normalized_gradient(flat, grad, grad_out.view(-1, width) if residual else None)
    else:
        grad_x = grad[:, :width] + grad_out.view(-1, width) if residual else grad[:, :width]
    return grad_x.to(x.dtype).contiguous().view(x.shape), [of_in], grad_out_weight
