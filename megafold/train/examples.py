"""An endless stream of batches whose place can be saved: epoch after epoch over a loader, or random structures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megafold.train.config import TrainConfig
from megafold.train.randomness import seeded

Batch = Mapping[str, Any]


class ExampleStream:
    """Batches of epoch 0, 1, 2, ... of ``start(epoch)``.

    A batch depends on the seed, the epoch and the place in it alone: it is drawn with generators of its own, so the
    stream neither sees nor moves the random state of the training step.

    Args:
        start: gives the batches of an epoch; the same ones in the same order for the same epoch.
    """

    def __init__(self, start: Callable[[int], Iterator[Batch]], seed: int) -> None:
        self._start, self._seed = start, seed
        self._batches: Iterator[Batch] | None = None
        self.epoch, self.position = 0, 0

    def state(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def seek(self, state: Mapping[str, int]) -> None:
        """Go to a place that :meth:`state` returned; batches before it in its epoch are drawn and dropped."""
        self.epoch, self.position, self._batches = state["epoch"], 0, None
        while self.position < state["position"]:
            self._draw()

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            ValueError: if an epoch has no batch.
        """
        batch = self._draw()
        if batch is None:
            self.epoch, self.position, self._batches = self.epoch + 1, 0, None
            batch = self._draw()
        if batch is None:
            raise ValueError(f"epoch {self.epoch} has no batch")
        return batch

    def _draw(self) -> Batch | None:
        with seeded(self._seed, self.epoch, self.position):
            if self._batches is None:
                self._batches = iter(self._start(self.epoch))
            batch = next(self._batches, None)
        self.position += 1
        return batch


def open_stream(config: TrainConfig, model_kwargs: Mapping[str, Any]) -> ExampleStream:
    """The stream that a configuration asks for.

    Raises:
        InputError: for a cache that is missing or unreadable, or an entry that it does not have.
    """
    data = config.data
    if data.synthetic is not None:
        return ExampleStream(lambda epoch: _synthetic(config, model_kwargs), config.seed)
    from megafold.evopipe.loader import make_loader

    loader = make_loader(
        data.cache,
        crop_size=data.crop_size,
        msa_depth=data.msa_depth,
        batch_size=data.batch_size,
        workers=data.workers,
        seed=config.seed,
        entries=list(data.entries) if data.entries is not None else None,
        labels=config.workload != "core",
        shuffle=data.shuffle,
    )

    def start(epoch: int) -> Iterator[Batch]:
        loader.dataset.set_epoch(epoch)
        return iter(loader)

    return ExampleStream(start, config.seed)


def _synthetic(config: TrainConfig, model_kwargs: Mapping[str, Any]) -> Iterator[Batch]:
    """The same few structures in every epoch, so that there is something to learn."""
    from megafold.train.synthetic import synthetic_batch

    sizes = config.data.synthetic
    for index in range(sizes.structures):
        yield synthetic_batch(
            sizes.n_tokens,
            atoms_per_token=sizes.atoms_per_token,
            msa_depth=config.data.msa_depth,
            templates=sizes.templates,
            workload=config.workload,
            seed=config.seed + index,
            model_kwargs=model_kwargs,
        )
