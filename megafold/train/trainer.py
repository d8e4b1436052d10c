"""One training step: forward, backward, gradient clipping and the optimizer, on one device.

The measurements of the suite call exactly this step, for every contender, so it holds nothing that is not training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megafold.evopipe.expand import expand, is_compact
from megafold.metrics.timing import Timer
from megafold.train.offload import HostCopies
from megafold.train.optimizer import OptimizerSettings

if TYPE_CHECKING:
    from megafold.evosp3d.reduce import Doubtful
    from megafold.metrics.timing import Mark
    from megafold.train.parallel import Parallel


class StepResult:
    """What one step did. Numbers stay on the device until they are read, so that a step adds no wait of its own.

    Attributes:
        skipped: the loss or the gradient norm was not finite, and the weights were left as they were.
        learning_rate: of this step.
    """

    def __init__(
        self,
        *,
        loss: Tensor,
        breakdown: Mapping[str, Tensor],
        grad_norm: Tensor,
        skipped: bool,
        learning_rate: float,
        timer: Timer,
        marks: tuple[Mark, Mark, Mark, Mark],
    ) -> None:
        self.skipped, self.learning_rate = skipped, learning_rate
        self._loss, self._breakdown, self._grad_norm = loss, breakdown, grad_norm
        self._timer, self._marks = timer, marks

    @cached_property
    def loss(self) -> float:
        return float(self._loss)

    @cached_property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping."""
        return float(self._grad_norm)

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """The stock model's loss terms by name (diffusion, distogram, confidence, ...), unweighted."""
        return {name: float(value) for name, value in self._breakdown.items()}

    @cached_property
    def forward_seconds(self) -> float:
        return self._timer.seconds(self._marks[0], self._marks[1])

    @cached_property
    def backward_seconds(self) -> float:
        """Backward pass, with what checkpointing recomputes in it."""
        return self._timer.seconds(self._marks[1], self._marks[2])

    @cached_property
    def optimizer_seconds(self) -> float:
        """Gradient clipping, the check for finite numbers and the update."""
        return self._timer.seconds(self._marks[2], self._marks[3])

    @cached_property
    def seconds(self) -> float:
        """The whole step: forward, backward and optimizer."""
        return self._timer.seconds(self._marks[0], self._marks[3])


class Trainer:
    """Holds a model and its optimizer on one device and takes steps.

    Args:
        model: an `alphafold3_pytorch.Alphafold3`, optimised or not, or any module that returns ``(loss, breakdown)``
            when called with ``return_loss_breakdown=True``. It is moved to ``device`` and put into training mode.
        settings: of the optimizer and its schedule.
        device: where the step runs; by default where the model is.
        dtype: of autocast: bfloat16 on a GPU and float32 (no autocast) on a CPU by default. Weights, gradients and
            optimizer state stay float32.
        parallel: the ranks that the model was made parallel over; without it this process is alone.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._parallel = parallel
        self.settings = settings or OptimizerSettings()
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.model = model.to(self.device).train()
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.settings.rate(0),
            betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=on_gpu,
            foreach=None if on_gpu else False,
        )
        self.timer = Timer(self.device)
        self._host = HostCopies(locks=on_gpu)
        self.steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0

    def step(self, batch: Mapping[str, Any]) -> StepResult:
        """Train on one batch: keyword arguments of the forward, or a compact batch of EvoPipe, copied to the device
        where they are elsewhere; a compact batch is expanded there.

        A loss or gradient norm that is not finite changes no weight and no optimizer state; the step still counts in
        ``steps`` (and so in the schedule), and in ``skipped`` and ``skipped_in_a_row``. The same goes for an alignment
        of the loss that finds no solution, which the stock model tells by an exception: its loss is NaN here. On
        several ranks loss and gradients are those of the global batch, so that all skip the same steps. Out of
        memory is raised as it comes, after the gradients of the broken step are dropped; the weights are then as they
        were before it.
        """
        whole = is_compact(batch)  # what a rank may leave out is not there yet
        if self._parallel is not None and not whole:
            batch = self._parallel.local(batch)
        inputs = expand({name: _to(value, self.device) for name, value in batch.items()})
        if self._parallel is not None and whole:
            inputs = self._parallel.local(inputs)
        rate, doubtful = self.settings.rate(self.steps), None
        start = self.timer.mark()
        try:
            with self._autocast():
                loss, breakdown = self.model(**inputs, return_loss_breakdown=True)
            after_forward = self.timer.mark()
            # Here and not before the forward: the host lets go of thousands of tensors while the device is busy.
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            loss = loss.detach()
            breakdown = {name: term.detach() for name, term in breakdown._asdict().items()}
            if self._parallel is not None:
                doubtful = self._parallel.reduce()
                loss, breakdown = self._parallel.mean(loss, breakdown)
        except torch.linalg.LinAlgError:
            after_forward = self.timer.mark()
            loss, breakdown = torch.tensor(torch.nan, device=self.device), {}
            self.optimizer.zero_grad(set_to_none=True)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        after_backward = self.timer.mark()
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_grad_norm).detach()
        fails = ~torch.isfinite(loss + grad_norm)
        skipped = self._update(rate, fails, doubtful)
        end = self.timer.mark()
        self.steps += 1
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return StepResult(
            loss=loss,
            breakdown=breakdown,
            grad_norm=grad_norm,
            skipped=skipped,
            learning_rate=rate,
            timer=self.timer,
            marks=(start, after_forward, after_backward, end),
        )

    def _update(self, rate: float, fails: Tensor, doubtful: Doubtful | None) -> bool:
        """Take the optimizer's step unless ``fails``, and return that: the only read of device numbers in a step.

        An update with NaN in it would be lost silently. The fused optimizer looks at ``fails`` on the device, so its
        launches need not wait for the backward to end. Weights that this rank had no gradient for wait for the read,
        and take a step of their own where another rank had one.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        numbers = fails.float().reshape(1)
        if doubtful is not None and doubtful.parameters:
            doubtful.set_aside()
            numbers = torch.cat([numbers, doubtful.used.to(numbers.device)])
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self.optimizer.found_inf = fails.to(self.device, torch.float32)
            self.optimizer.step()
        failed, *used = numbers.tolist()
        if not on_gpu and not failed:
            self.optimizer.step()
        if used and (late := doubtful.give_back(used)) and not failed:
            self._step_of(late)
        return bool(failed)

    def _step_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer's step of these alone."""
        chosen = {id(parameter) for parameter in parameters}
        others = [(p, p.grad) for p in self.parameters if p.grad is not None and id(p) not in chosen]
        for parameter, _ in others:
            parameter.grad = None
        self.optimizer.step()
        for parameter, gradient in others:
            parameter.grad = gradient

    def offload(self) -> None:
        """Drop the gradients and move weights and optimizer state to host memory, to leave the device to another.

        Only the first call takes that memory, page-locked beside a GPU. On a CPU nothing moves.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cpu":
            return
        self._host.save(self._resident())
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Bring weights and optimizer state back to the device after :meth:`offload`."""
        if self.device.type != "cpu":
            self._host.restore([tensor for tensor in self._resident() if tensor.device.type == "cpu"], self.device)

    def persistent_bytes(self) -> int:
        """Bytes of weights, buffers, gradients (as large as the trained weights) and optimizer state after a step."""
        kept = [*self._resident(), *self.parameters]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def _resident(self) -> list[Tensor]:
        """What stays on the device from step to step, gradients left out; only ever longer."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]

    def _autocast(self):
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if torch.is_tensor(value) else value
