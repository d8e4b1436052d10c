"""Registration of this project's operators with PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megafold.replay import replayed

_LIBRARY = torch.library.Library("megafold", "FRAGMENT")


def define(
    name: str,
    schema: str,
    implementation: Callable,
    fake: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> torch._ops.OpOverload:
    """Register `megafold::<name>`; without `backward`, differentiating it is an error that says so.

    Its implementation is `replayed`: see there what it may do.

    Neither torch.library.custom_op nor register_autograd: the first one's wrapper costs more host time than launching
    the kernels does, the second one's grows with the square of the number of arguments (0.15 ms for 14 of them).

    Args:
        schema: arguments and results, no lists of tensors and no defaults.
        fake: shapes, dtypes and strides of the results.
        backward, setup_context: as of a torch.autograd.Function, with one gradient for each argument.
    """
    tags = [torch.Tag.pt2_compliant_tag]
    if hasattr(torch.Tag, "needs_exact_strides"):
        tags.append(torch.Tag.needs_exact_strides)
    _LIBRARY.define(f"{name}{schema}", tags=tuple(tags))
    _LIBRARY.impl(name, replayed(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"megafold::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.megafold, name).default

    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            found = operator(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, found)
        return found

    def refuse_double_backward(ctx, *grads):
        plain = name.removesuffix("_backward")
        raise NotImplementedError(
            f"{plain}: double backward is not implemented; use its reference module where a gradient of a gradient "
            "is needed"
        )

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward or refuse_double_backward)}
    node = type(f"Megafold_{name}", (torch.autograd.Function,), members)

    def differentiate(*arguments):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return node.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    _LIBRARY.impl(name, differentiate, "Autograd")
    return operator
