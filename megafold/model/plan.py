"""Which parts of a model MegaFold computes itself: one switch per part, so that a sweep can ablate each alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megafold.errors import InputError


@dataclass(frozen=True)
class Plan:
    """The switches of :func:`megafold.model.optimize.optimize`.

    Attributes:
        shared_conditioning: what the augmentations of the diffusion module have in common (pair conditioning, attention
            biases of the token transformer, atom and atom-pair features before noise enters) is computed once a
            structure and broadcast, instead of once an augmentation.
        shared_rollout: what the network evaluations of a rollout have in common (pair conditioning and all attention
            biases of the token transformer) is computed once a rollout; needs ``shared_conditioning``.
        asynchronous: the forward of a training step waits for the device only where the host must know a number.
        chunked_heads: distogram and confidence head and the losses on pairs of atoms work on a part at a time; the
            confidence head's gradients are summed up as they come.
        recompute: under checkpointing one tensor is kept for each block of the diffusion transformers, and atom pairs,
            single and pair conditioning and position encodings are computed again in the backward; for long structures
            the Pairformer keeps one tensor for a group of blocks.
        sdpa: attention goes through ``torch.nn.functional.scaled_dot_product_attention``.
        evoflash3d: triangle, single and token attention go through :func:`megafold.evoflash3d.api.evoflash3d`. What
            that kernel cannot express, and devices that its kernels do not run on, stay with ``sdpa`` (if on), else
            with the stock code or the kernel's reference.
        evofusion: what surrounds the attention (norms with projections, triangle updates, transitions, gates, the MSA
            module, conditioning, attention of atoms, smooth lDDT) goes through :mod:`megafold.evofusion`.
        graphs: the checkpointed blocks of Pairformer, MSA module and token transformer are captured as CUDA (HIP)
            graphs, once a block and shape; on a CPU they run one operator at a time.
    """

    shared_conditioning: bool = True
    shared_rollout: bool = True
    asynchronous: bool = True
    chunked_heads: bool = True
    recompute: bool = True
    sdpa: bool = True
    evoflash3d: bool = True
    evofusion: bool = True
    graphs: bool = True

    @classmethod
    def none(cls) -> Plan:
        """The stock model: every switch off."""
        return cls(**{field.name: False for field in fields(cls)})

    @classmethod
    def only(cls, *switches: str) -> Plan:
        """Every switch off but ``switches``."""
        return cls(**{field.name: field.name in switches for field in fields(cls)})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None, file: str = "plan") -> Plan:
        """A plan from the ``plan:`` section of a configuration; what is left out keeps its default.

        Raises:
            InputError: for an unknown switch or a value that is not true or false; ``file`` names where it came from.
        """
        if mapping is None:
            return cls()
        if not isinstance(mapping, Mapping):
            raise InputError(file, "", f"found {mapping!r}, expected a mapping of switches to true or false")
        known = [field.name for field in fields(cls)]
        for key, value in mapping.items():
            if key not in known:
                raise InputError(file, str(key), f"unknown switch; known: {', '.join(known)}")
            if not isinstance(value, bool):
                raise InputError(file, str(key), f"found {value!r}, expected true or false")
        return cls(**mapping)

    def as_dict(self) -> dict[str, bool]:
        """Every switch by name, for records and reports; ``Plan.from_mapping`` takes it back."""
        return asdict(self)
