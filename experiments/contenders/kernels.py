"""Triangle attention by itself: right numbers first, then forward and forward + backward, eager and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from experiments.contenders.floors import attention_floor
from experiments.contenders.peers import Attention, find_attention
from experiments.contenders.timed import TimedSession, relative_errors
from experiments.providers import Context
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import check_budget, outputs_and_gradients

# Length at which numbers are checked. On a GPU above the 100 up to which cuEquivariance does not use its kernels.
CHECK_LENGTH = {"cpu": 17, "cuda": 128}
MASKED = 0.2
FP32_BIAS = "triangle_attention_fp32_bias"


class KernelSession(TimedSession):
    """One contender's attention at one shape, with inputs in its own layout and no padding (mask: keep everything).

    Raises:
        Unsupported: the contender cannot run here.
        WrongNumbers: its output or a gradient is off by more than twice the error of eager PyTorch in the same dtype.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        setting = context.point.setting
        self._n = setting.size("n_tokens")
        self._rows = setting.size("rows") or self._n
        self._batch, self._heads = setting.size("batch_size"), setting.size("heads")
        self._head_dim = setting.size("head_dim")
        self._bias_dtype = torch.float32 if setting.workload == FP32_BIAS else self._dtype
        self._attention = find_attention(context.point.contender.provider, context.device, self._n)
        self.notes = [self._attention.note] if self._attention.note else []
        if self._attention.narrow_bias and self._bias_dtype != self._dtype:
            self.notes.append(f"takes a bias in {setting.dtype} alone: converting it, and its gradient, is in the time")
        self.checked = f"N = {CHECK_LENGTH[self._device]}"
        self.errors = self._check()
        sizes = (self._batch, self._rows, self._heads, self._n, self._head_dim)
        self.floor = attention_floor(*sizes, self._dtype.itemsize, self._bias_dtype.itemsize)

    def _prepare(self) -> tuple[Callable[[], Tensor], list[Tensor]]:
        inputs, mask = self._inputs(self._n, self._rows, self._batch)
        leaves = [tensor.requires_grad_() for tensor in _native(self._attention, inputs).values()]
        mask = _native_mask(self._attention, mask if self._attention.needs_mask else None, self._dtype)
        return lambda: self._attention(*leaves, mask), leaves

    def _inputs(self, n: int, rows: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
        # Drawn where they are used: on a host the draws of a long structure take longer than all that is timed.
        generator = torch.Generator(self._device).manual_seed(self._seed)

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device).to(dtype)

        shape = (batch, rows, self._heads, n, self._head_dim)
        inputs = {name: draw(*shape, dtype=self._dtype) for name in ("q", "k", "v")}
        inputs["bias"] = draw(batch, self._heads, n, n, dtype=self._bias_dtype)
        return inputs, torch.ones(batch, rows, n, dtype=torch.bool, device=self._device)

    def _check(self) -> dict[str, float]:
        """Relative errors, the larger of two runs: with a random mask in every row, and as timed, where all is kept."""
        found = [self._check_one(masked) for masked in (True, False)]
        return {name: max(errors[name] for errors in found) for name in found[0]}

    def _check_one(self, masked: bool) -> dict[str, float]:
        n = CHECK_LENGTH[self._device]
        inputs, mask = self._inputs(n, n, 1)
        generator = torch.Generator().manual_seed(self._seed + 1)
        if masked:
            mask &= (torch.rand(mask.shape, generator=generator) >= MASKED).to(self._device)
            mask[..., 0] = True  # what a row without any key gives differs between contenders
        cotangent = torch.randn(inputs["q"].shape, generator=generator).to(self._device)
        attention, order = self._attention, self._attention.order
        given = mask if masked or attention.needs_mask else None

        def as_timed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            native = _native(attention, {"q": q, "k": k, "v": v, "bias": bias})
            return attention(*native.values(), _native_mask(attention, given, self._dtype))

        doubles = {name: tensor.double() for name, tensor in inputs.items()}
        exact = outputs_and_gradients(eager_attention, doubles, cotangent, mask=mask)
        eager = outputs_and_gradients(eager_attention, inputs, cotangent, mask=mask)
        # As when it is timed, d(out) is contiguous in the contender's layout: some kernels look at no strides of it.
        found = outputs_and_gradients(as_timed, inputs, cotangent.permute(order).contiguous())
        found["out"] = found["out"].permute(order)
        self._accept(check_budget(found, eager, exact))
        return relative_errors(found, exact)


def _native(attention: Attention, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs in the contender's layout: contiguous, detached only where nothing has to be moved."""
    found = {name: inputs[name].permute(attention.order).contiguous() for name in ("q", "k", "v")}
    found["bias"] = inputs["bias"][:, None].contiguous() if attention.wide_bias else inputs["bias"]
    return found


def _native_mask(attention: Attention, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else attention.mask(mask, dtype)
