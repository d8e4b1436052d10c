"""One of two ranks of `megafold train`, of which rank 1 fails at its third step: `failing_rank.py MODE FOLDER DEVICE`.

MODE: `kill` (SIGKILL), `oom` (the device's memory is used up), `sleep` (a collective waits past its time-out).
"""

import os
import signal
import sys
import time

import torch

from megafold.stock import load_stock

LIMIT_S = {"kill": 600, "oom": 600, "sleep": 20}


def main(mode: str, folder: str, device: str) -> None:
    load_stock()
    from megafold.train import loop
    from megafold.train.config import config_from_mapping
    from megafold.train.trainer import Trainer

    step = Trainer.step

    def failing(self, batch):
        if self.steps == 2:
            print(f"{mode} at {time.time()}", flush=True)
            if os.environ["RANK"] == "1":
                _fail(mode, device)
        return step(self, batch)

    Trainer.step = failing
    loop.train(
        config_from_mapping(
            {
                "output": folder,
                "steps": 100000,
                "device": device,
                "plan": "none",
                "model": {"preset": "tiny", "overrides": {"diffusion_num_augmentations": 2}},
                "data": {"synthetic": {"n_tokens": 20, "atoms_per_token": 3, "structures": 3}, "msa_depth": 3},
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
                "parallel": {"sp": 2, "timeout_s": LIMIT_S[mode]},
            }
        )
    )


def _fail(mode: str, device: str) -> None:
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "sleep":
        time.sleep(600)
    if device == "cuda":
        torch.empty(1 << 40, device="cuda")
    raise torch.OutOfMemoryError("out of memory, as a device would say it")


if __name__ == "__main__":
    main(*sys.argv[1:])
