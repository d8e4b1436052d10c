"""torch.compile on a stock model: the layers of its large stacks, each compiled in place.

The whole step does not compile: `Alphafold3.forward` branches on data and loops over chains on the host. Its
layers do, each to one graph without breaks, and layers of one kind share their graphs. What they hold is where the
time goes (Pairformer, MSA module, template embedder, token transformer). Not compiled: the atom transformers, whose
shape changes with every real structure and would be compiled anew each time.

On a CPU, where each fused kernel costs a run of the C++ compiler (a pair block: 30 of them, over a minute), only the
pair transitions are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.nn import Module

# One process meets several lengths and masks. Above its limit torch would fall back to eager without a word.
MOST_GRAPHS = 256


def compile_stacks(model: Module, device: str, backend: str = "inductor") -> Mapping[str, bool]:
    """Compile in place; parameters keep their names and values. No flags: the FLOPs are the stock model's."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = 16 * MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    on_cpu = device == "cpu"
    for layer in _pair_transitions(model) if on_cpu else _layers(model):
        layer.compile(backend=backend, dynamic=on_cpu)
    return {}


def _layers(model: Module) -> Iterator[Module]:
    for layer in model.pairformer.layers:
        yield from layer
    for layer in model.msa_module.layers:
        yield from layer
    yield from model.template_embedder.pairformer_stack
    for layer in model.diffusion_module.token_transformer.layers:
        yield from (part for part in layer if part is not None)


def _pair_transitions(model: Module) -> Iterator[Module]:
    for pair_block, *_ in model.pairformer.layers:
        yield pair_block.pairwise_transition
    for *_, pair_block in model.msa_module.layers:
        yield pair_block.pairwise_transition
