"""Settings of the optimizer and its schedule (AF3 supplement 5.4), without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from megafold.train.settings import limited


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

    learning_rate: float = limited(1.8e-3, above=0)
    beta1: float = limited(0.9, least=0, most=0.9999)
    beta2: float = limited(0.95, least=0, most=0.99999)
    eps: float = limited(1e-8, above=0)
    weight_decay: float = limited(0.0, least=0)
    clip_grad_norm: float = limited(10.0, above=0)
    warmup_steps: int = limited(1000, least=0)
    decay_factor: float = limited(0.95, above=0, most=1)
    decay_every: int = limited(50_000, least=1)

    def rate(self, step: int) -> float:
        """Learning rate of step number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * self.decay_factor ** ((step - self.warmup_steps) / self.decay_every)
