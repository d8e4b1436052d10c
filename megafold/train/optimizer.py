"""Settings of the optimizer and its schedule (AF3 supplement 5.4), without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with warm-up and decay; the defaults are the paper's and the stock trainer's (weight decay 0 is Adam).

    Attributes:
        learning_rate: the rate after warm-up, reached linearly.
        warmup_steps: steps of the warm-up; the first step already moves (rate / warmup_steps).
        decay_factor, decay_every: after warm-up the rate is multiplied by ``decay_factor`` per ``decay_every`` steps,
            continuously.
        clip_grad_norm: largest norm of all gradients together; larger ones are scaled down to it.
    """

    learning_rate: float = 1.8e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float = 10.0
    warmup_steps: int = 1000
    decay_factor: float = 0.95
    decay_every: int = 50_000

    def rate(self, step: int) -> float:
        """Learning rate of step number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * self.decay_factor ** ((step - self.warmup_steps) / self.decay_every)
