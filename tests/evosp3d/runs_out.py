"""A contender of two ranks without a model: on 8 tokens the second one runs out of memory, and the first waits for it.

Loaded by name into the workers of a measurement (MEGAFOLD_PROVIDERS).
"""

from experiments.providers import provider


@provider("iteration", "runs_out")
def runs_out(context):
    import types

    import torch
    import torch.distributed as dist

    from experiments.contenders.sequence_parallel import TIMES, SequenceParallelSession

    class Light:
        model = torch.nn.Identity()

        def onload(self):
            pass

        def persistent_bytes(self):
            return 0

        def step(self, batch):
            if batch["molecule_atom_lens"].shape[1] == 8 and dist.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            dist.all_reduce(torch.ones(1))
            times = {name.replace("iteration_time", "seconds").replace("_time", "_seconds"): 1.0 for name in TIMES}
            return types.SimpleNamespace(loss=1.0, skipped=False, **times)

    class Session(SequenceParallelSession):
        def _build(self):
            self._trainer = Light()

    return Session(context)
