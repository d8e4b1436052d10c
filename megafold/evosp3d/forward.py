"""The whole forward on a rank: the stock code with pairs as rows, and the loss of the batch from the ranks' parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megafold.evosp3d.collectives import Gather, run
from megafold.evosp3d.diffusion import CHAINS
from megafold.evosp3d.heads import bins_of, cross_entropy_of_rows, masked_mean_of_part
from megafold.evosp3d.spread import einx_of_rows
from megafold.model.forward import read_chains
from megafold.model.rebind import Stand, with_names
from megafold.model.repeated import repeat_lazily

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards

_PAIRS_WHERE = "b i j, b i j d, -> b i j d"


def local_batch(batch: dict[str, Any], shards: Shards) -> dict[str, Any]:
    """A batch without the rows of templates that this rank never reads; to be called before it goes to the device."""
    templates = batch.get("templates")
    if templates is None:
        return batch
    return {**batch, "templates": shards.narrow(templates, 2).contiguous()}


def model_forward(
    self: Module, *, shards: Shards, replaced: bool, return_loss_breakdown: bool = False, **batch: Any
) -> Any:
    """``Alphafold3.forward``: the whole batch on every rank of the group.

    The loss that comes back is that of the batch on every rank, and so are its terms; its *gradient* is that of this
    rank's part (see :mod:`megafold.evosp3d.collectives`), so that gradients are to be summed over the group once.
    Sampled positions and logits come back whole. Where the diffusion loss is ``replaced`` (see
    :func:`megafold.evosp3d.diffusion.diffusion_loss`) the chains of one structure are read here, while the device has
    nothing to finish before it can answer: a host that waits behind the trunk has nothing queued for what comes next.
    """
    if batch.get("templates") is None:
        lens = batch["molecule_atom_lens"]
        tokens, device = lens.shape[1], self.device
        # As the stock code makes them, but one number in memory.
        none = torch.zeros((), dtype=batch["atom_inputs"].dtype, device=device)
        batch["templates"] = none.expand(lens.shape[0], 1, tokens, tokens, self.dim_template_feats)
        batch["template_mask"] = torch.zeros(lens.shape[0], 1, dtype=torch.bool, device=device)
    if replaced and batch.get("atom_pos") is not None and batch["molecule_atom_lens"].shape[0] == 1:
        self.edm.__dict__[CHAINS] = read_chains(batch)
    try:
        out = stock_forward(type(self), shards)(self, return_loss_breakdown=True, **batch)
    finally:
        self.edm.__dict__.pop(CHAINS, None)
    if not (isinstance(out, tuple) and hasattr(out[1], "total_loss")):
        return _whole_logits(out, shards)
    loss, terms = out
    parts = torch.stack([term.detach().to(loss.dtype) for term in terms])
    if shards.size > 1:
        dist.all_reduce(parts, group=shards.group)
        loss = loss + (parts[0] - loss).detach()
    terms = type(terms)(*parts.unbind())
    return (loss, terms) if return_loss_breakdown else loss


def stock_forward(cls: type[Module], shards: Shards):
    """``Alphafold3.forward`` with the names that touch pairs replaced."""

    whole = einx_of_rows()

    def where(pattern: str, condition: Tensor, *values: Any) -> Tensor:
        if pattern == _PAIRS_WHERE:
            condition = shards.narrow(condition, 1)
        return whole.where(pattern, condition, *values)

    return with_names(
        cls.forward,
        repeat=repeat_lazily,
        einx=einx_of_rows(where=where),
        F=Stand(F, cross_entropy=cross_entropy_of_rows(shards)),
        masked_mean=masked_mean_of_part(shards),
        distance_to_dgram=bins_of,
    )


def _whole_logits(out: Any, shards: Shards) -> Any:
    if not (isinstance(out, tuple) and hasattr(out[1], "_asdict")):
        return out
    positions, logits = out
    tokens = logits.pde.shape[-1]
    whole = {
        name: run(Gather(dim=2, total=tokens), value, shards, "logits")
        for name, value in logits._asdict().items()
        if name in ("pae", "pde", "distance") and value is not None
    }
    return positions, logits._replace(**whole)
