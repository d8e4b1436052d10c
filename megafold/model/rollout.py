"""The rollout that feeds the confidence head (AF3 algorithm 18): its schedule on the host, its conditioning once."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megafold.model.geometry import augmented

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import ElucidatedAtomDiffusion


@torch.no_grad()
def sample(
    self: ElucidatedAtomDiffusion,
    atom_mask: Tensor,
    num_sample_steps: int | None = None,
    clamp: bool = False,
    use_tqdm_pbar: bool = True,
    tqdm_pbar_title: str = "sampling time step",
    return_all_timesteps: bool = False,
    shares_rollout: bool = True,
    **features: Any,
) -> Tensor:
    """``ElucidatedAtomDiffusion.sample``: atom_mask [B, M] -> positions [B, M, 3], or [steps + 1, B, M, 3].

    ``features`` condition the network and stay the same for all its evaluations (two a step, one in the last); with
    ``shares_rollout`` what is made of them alone (pair conditioning, attention biases) is kept from the first on.
    """
    steps = self.num_sample_steps if num_sample_steps is None else num_sample_steps
    shape, device, dtype = (*atom_mask.shape, 3), atom_mask.device, self.dtype
    features = {**features, "atom_mask": atom_mask}
    if shares_rollout:
        features["memory"] = {}
    augment = self.centre_random_augmenter if self.augment_during_sampling else None

    # On the host: read from the device, three numbers a step would stop the queue.
    sigmas = self.sample_schedule(steps, device="cpu").tolist()
    churn = min(self.S_churn / steps, math.sqrt(2) - 1)
    positions = sigmas[0] * torch.randn(shape, dtype=dtype, device=device)
    history = [positions]
    pairs = itertools.pairwise(sigmas)
    for sigma, sigma_next in _shown(pairs, steps, tqdm_pbar_title) if use_tqdm_pbar else pairs:
        if augment is not None:
            with torch.autocast(device.type, enabled=False):
                positions = augmented(augment, positions.float()).type(dtype)
        hat = sigma * (1 + (churn if self.S_tmin <= sigma <= self.S_tmax else 0.0))
        noise = self.S_noise * torch.randn(shape, dtype=dtype, device=device)
        noised = positions + math.sqrt(hat**2 - sigma**2) * noise
        denoised = self.preconditioned_network_forward(noised, hat, clamp=clamp, network_condition_kwargs=features)
        slope = (noised - denoised) / hat
        positions = noised + (sigma_next - hat) * slope * self.step_scale
        if self.karras_formulation and sigma_next != 0:
            again = self.preconditioned_network_forward(
                positions, sigma_next, clamp=clamp, network_condition_kwargs=features
            )
            slope_next = (positions - again) / sigma_next
            positions = noised + 0.5 * (sigma_next - hat) * (slope + slope_next) * self.step_scale
        history.append(positions)
    found = torch.stack(history) if return_all_timesteps else positions
    return found.clamp(-1.0, 1.0) if clamp else found


def _shown(pairs: Any, steps: int, title: str) -> Any:
    from tqdm import tqdm

    return tqdm(pairs, desc=title, total=steps)
