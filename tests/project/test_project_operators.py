"""How this project's operators live with PyTorch, shown on one that doubles and adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafold.operators import define


def _context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    ctx.saved_tensors  # noqa: B018 (they can be had)
    return _twice_backward(grad), grad.sum(), None


_twice_backward = define(
    "test_twice_backward", "(Tensor grad) -> Tensor", lambda grad: 2 * grad, lambda grad: grad.new_empty(grad.shape)
)
twice = define(
    "test_twice",
    "(Tensor x, Tensor shift, bool flag) -> (Tensor, Tensor)",
    lambda x, shift, flag: (2 * x + shift, x > 0),
    lambda x, shift, flag: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)),
    _backward,
    _context,
)


def test_gradients_go_where_they_are_asked_for():
    x, shift = torch.randn(3, requires_grad=True), torch.randn((), requires_grad=True)
    out, positive = twice(x, shift, True)
    assert out.requires_grad and not positive.requires_grad
    of_x, of_shift = torch.autograd.grad(out.sum(), (x, shift))
    assert torch.equal(of_x, torch.full((3,), 2.0)) and of_shift == 3
    (alone,) = torch.autograd.grad(twice(x.detach(), shift, True)[0].sum(), shift)
    assert alone == 3
    assert not twice(x.detach(), shift.detach(), True)[0].requires_grad
    with torch.no_grad():
        assert not twice(x, shift, True)[0].requires_grad


def test_a_second_derivative_is_refused_by_name():
    x, shift = torch.randn(3, requires_grad=True), torch.zeros(())
    (grad,) = torch.autograd.grad((twice(x, shift, True)[0] ** 2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="test_twice: double backward is not implemented"):
        grad.sum().backward()


def test_what_is_not_differentiated_is_let_through_functorch():
    x, shift, p = torch.randn(3), torch.zeros(()), torch.randn(3)
    grad = torch.func.grad(lambda p: (twice(x, shift, True)[0] * p).sum())(p)
    assert torch.equal(grad, 2 * x)


def test_registration_is_what_pytorch_checks():
    for x in (torch.randn(3), torch.randn(3, requires_grad=True)):
        torch.library.opcheck(twice, (x, torch.zeros(()), True))
