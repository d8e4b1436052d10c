"""The trainer: configuration, step, loop, checkpoints."""
