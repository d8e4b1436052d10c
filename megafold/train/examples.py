"""An endless stream of batches whose place can be saved: epoch after epoch over a loader, or random structures."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from megafold.train.config import TrainConfig
from megafold.train.randomness import seeded
from megafold.train.stop import SIGNALS

Batch = Mapping[str, Any]


class ExampleStream:
    """Batches of epoch 0, 1, 2, ...

    A batch depends on the seed, the epoch and the place in it alone: it is drawn with generators of its own, so the
    stream neither sees nor moves the random state of the training step.

    With several ``replicas`` each draws the batches at its own places, one after the others'; the place that
    :meth:`state` tells is the first replica's, and the same on all of them.

    Args:
        start: ``start(epoch, skip)`` gives the batches of an epoch but the first ``skip``; the same ones in the same
            order for the same epoch. With replicas ``start(epoch, skip, step)``, of which it gives every ``step``-th.
        length: batches in an epoch; for replicas only.
    """

    def __init__(
        self,
        start: Callable[..., Iterator[Batch]],
        seed: int,
        *,
        replica: int = 0,
        replicas: int = 1,
        length: int = 0,
    ) -> None:
        self._start, self._seed = start, seed
        self._replica, self._replicas, self._length = replica, replicas, length
        self._batches: Iterator[Batch] | None = None
        self._next_own = (-1, -1)
        self.epoch, self.position = 0, 0

    def state(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def seek(self, state: Mapping[str, int]) -> None:
        """Go to a place that :meth:`state` returned."""
        self.epoch, self.position, self._batches = state["epoch"], state["position"], None

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            ValueError: if an epoch has no batch.
        """
        if self._replicas > 1:
            return self._draw_own()
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
                self._batches = self._start(self.epoch, self.position)
            batch = next(self._batches, None)
        self.position += 1
        return batch

    def _draw_own(self) -> Batch:
        if not self._length:
            raise ValueError(f"epoch {self.epoch} has no batch")
        later, place = divmod(self.position + self._replica, self._length)
        epoch = self.epoch + later
        with seeded(self._seed, epoch, place):
            if self._batches is None or self._next_own != (epoch, place):
                self._batches = self._start(epoch, place, self._replicas)
            batch = next(self._batches)
        self._next_own = (epoch, place + self._replicas)
        later, self.position = divmod(self.position + self._replicas, self._length)
        self.epoch += later
        return batch


def open_stream(
    config: TrainConfig, model_kwargs: Mapping[str, Any], replica: int = 0, replicas: int = 1
) -> ExampleStream:
    """The stream that a configuration asks for; of ``replicas`` the part of one.

    Raises:
        InputError: for a cache that is missing or unreadable, or an entry that it does not have.
    """
    data = config.data
    if data.synthetic is not None:
        places = {"replica": replica, "replicas": replicas, "length": data.synthetic.structures}
        return ExampleStream(
            lambda epoch, skip, step=1: _synthetic(config, model_kwargs, skip, step), config.seed, **places
        )
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
        clusters=data.clusters,
        compact=True,  # the trainer expands it on its device
    )

    loader.worker_init_fn = partial(_start_worker, then=loader.worker_init_fn)
    places = {"replica": replica, "replicas": replicas, "length": len(loader)}
    return ExampleStream(lambda epoch, skip, step=1: _cached(loader, epoch, skip, step), config.seed, **places)


def _start_worker(worker: int, then: Callable[[int], None] | None) -> None:
    """SLURM and Ctrl-C signal every process of a job. The main process decides when to stop; a worker that died first
    would end the run in the middle of a step."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


def _cached(loader: DataLoader, epoch: int, skip: int, step: int = 1) -> Iterator[Batch]:
    """An epoch of the cache, each batch with the names of its entries (the stock model names them in warnings)."""
    loader.dataset.set_epoch(epoch)
    order, size = list(loader.sampler), loader.batch_size
    places = range(skip, -(-len(order) // size), step)
    if skip or step > 1:
        # The batches of before a resume are not read again, nor are those of other replicas.
        loader = DataLoader(
            loader.dataset,
            batch_size=size,
            sampler=[index for place in places for index in order[place * size : (place + 1) * size]],
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
        )
    for number, batch in zip(places, loader):
        names = [loader.dataset.name_of(index) for index in order[number * size : (number + 1) * size]]
        yield {**batch, "filepath": names}


def _synthetic(config: TrainConfig, model_kwargs: Mapping[str, Any], skip: int, step: int = 1) -> Iterator[Batch]:
    """The same few structures in every epoch, so that there is something to learn."""
    from megafold.train.synthetic import synthetic_batch

    sizes = config.data.synthetic
    for index in range(skip, sizes.structures, step):
        batch = synthetic_batch(
            sizes.n_tokens,
            atoms_per_token=sizes.atoms_per_token,
            msa_depth=config.data.msa_depth,
            templates=sizes.templates,
            workload=config.workload,
            seed=config.seed + index,
            model_kwargs=model_kwargs,
        )
        yield {**batch, "filepath": [f"synthetic-{config.seed + index}"]}
