"""The one reduction of a step: gradients of all ranks, summed over sp and averaged over dp, under the backward.

Parameters lie in buckets in the order in which their gradients were ready in the first step (rank 0's order, told to
all). A bucket leaves when its last gradient is there and all buckets before it have left, so that every rank sends the
same ones in the same order; what no gradient came for leaves at the end, as zeros. One element a parameter tells
whether any rank had a gradient, since a parameter without one is left alone by the optimizer, decay included.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafold.evosp3d.traffic import Traffic

BUCKET_BYTES = 32 << 20


class GradientReducer:
    """Hooks on the parameters; :meth:`finish` after each backward makes ``.grad`` that of the global batch.

    Args:
        parameters: in the model's order, the same on all ranks.
        dp: how many data-parallel groups the mean is over.
        group: the world by default.
        traffic: counts what this rank sends.
        bucket_bytes: of gradients sent at once.

    A backward that is not followed by :meth:`finish` must be followed by :meth:`drop`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        dp: int,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic or Traffic()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._dp, self._group, self._bucket_bytes = dp, group, bucket_bytes
        self._order: list[int] = []
        self._sent: list[tuple[list[int], Tensor, dist.Work]] = []
        self._arrange(list(reversed(range(len(self._parameters)))))
        # By a weak reference: the garbage collector does not look into a tensor's hooks, and a reducer that its own
        # parameters held would keep weights and gradients for ever.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_Hook(weakref.ref(self), index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._settled = False

    def finish(self) -> None:
        """Put the sums where the gradients were: None where no rank had one, which the host waits for."""
        doubtful = self.sum()
        doubtful.set_aside()
        if doubtful.parameters:
            doubtful.give_back(doubtful.used.tolist())

    def sum(self) -> Doubtful:
        """As :meth:`finish`, without waiting: what this rank had no gradient for has zeros where no other had one."""
        while len(self._sent) < len(self._buckets):
            self._send()
        flags, absent, first = [], [], 0
        for members, flat, work in self._sent:
            work.wait()
            if self._dp > 1:
                flat.div_(self._dp)
            sizes = [self._parameters[index].numel() for index in members]
            *gradients, used = flat.split([*sizes, len(members)])
            for place, (index, gradient) in enumerate(zip(members, gradients)):
                parameter = self._parameters[index]
                if parameter.grad is None:
                    absent.append((first + place, parameter))
                parameter.grad = gradient.view_as(parameter)
            flags.append(used)
            first += len(members)
        used = torch.cat([flag.float() for flag in flags]) if flags else torch.zeros(0)
        order, self._sent = self._order, []
        if not self._settled:
            self._settle(order)
        self._reset()
        return Doubtful([place for place, _ in absent], [parameter for _, parameter in absent], used)

    def drop(self) -> None:
        """Forget a backward that was not finished: what is on its way is waited for and left unread."""
        for _, _, work in self._sent:
            work.wait()
        self._sent = []
        self._reset()

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _arrange(self, order: list[int]) -> None:
        """Cut the order into buckets of one dtype and at most ``bucket_bytes`` (or one parameter)."""
        self._buckets: list[list[int]] = []
        size, dtype = 0, None
        for index in order:
            parameter = self._parameters[index]
            number = parameter.numel() * parameter.element_size()
            if not self._buckets or size + number > self._bucket_bytes or parameter.dtype != dtype:
                self._buckets.append([])
                size, dtype = 0, parameter.dtype
            self._buckets[-1].append(index)
            size += number
        self._place = {index: place for place, members in enumerate(self._buckets) for index in members}
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(members) for members in self._buckets]
        self._order = []

    def _ready(self, index: int) -> None:
        self._order.append(index)
        self._missing[self._place[index]] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        members = self._buckets[len(self._sent)]
        chosen = [self._parameters[index] for index in members]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        flags = torch.tensor([float(p.grad is not None) for p in chosen], dtype=chosen[0].dtype)
        flat = torch.cat([*(g.flatten() for g in gradients), flags.to(chosen[0].device, non_blocking=True)])
        size = dist.get_world_size(self._group)
        self._traffic.add("all_reduce", "gradients", 2 * (size - 1) * flat.numel() * flat.element_size() // size)
        self._sent.append((members, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _settle(self, order: list[int]) -> None:
        """The buckets of the steps to come: the order of this backward, and last what had no gradient in it."""
        told = [[*order, *(index for index in range(len(self._parameters)) if index not in set(order))]]
        dist.broadcast_object_list(told, src=0, group=self._group)
        self._arrange(told[0])
        self._settled = True


class Doubtful:
    """Parameters that this rank had no gradient for; whether another had one is known to the device alone.

    Attributes:
        parameters: with sums in ``.grad``.
        used: fp32, one number for each parameter of the model, above 0 where some rank had a gradient.
    """

    def __init__(self, places: list[int], parameters: list[nn.Parameter], used: Tensor) -> None:
        self._places, self.parameters, self.used = places, parameters, used
        self._gradients: list[Tensor] = []

    def set_aside(self) -> None:
        """Take their gradients away, so that an optimizer leaves them alone."""
        self._gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def give_back(self, used: Sequence[float]) -> list[nn.Parameter]:
        """Give those their gradients for which some rank had one, by the numbers of :attr:`used`; returns them."""
        found = []
        for place, parameter, gradient in zip(self._places, self.parameters, self._gradients):
            if used[place]:
                parameter.grad = gradient
                found.append(parameter)
        self._gradients = []
        return found


class _Hook:
    """Tells a reducer, as long as it is there, that a parameter has its gradient."""

    def __init__(self, reducer: weakref.ref[GradientReducer], index: int) -> None:
        self._reducer, self._index = reducer, index

    def __call__(self, parameter: Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer._ready(self._index)
