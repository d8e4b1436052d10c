"""Parity of the `full` workload (rollout, confidence head), of checkpointing and of the stock model's rarer options."""

from __future__ import annotations

import pytest

from megafold.model.plan import Plan

PLANS = {
    "shared_conditioning+shared_rollout": Plan.only("shared_conditioning", "shared_rollout"),
    "asynchronous": Plan.only("asynchronous"),
    "chunked_heads": Plan.only("chunked_heads"),
    "evofusion": Plan.only("evofusion"),
    "all": Plan(graphs=False),
    "all-through-evoflash3d": Plan(sdpa=False, graphs=False),
}
CHECKPOINTS = ("input_embedding", "trunk_pairformer", "diffusion_module", "confidence_head")
EXTRAS = {
    "pairformer_stack": {"depth": 2, "add_value_residual": True, "num_register_tokens": 2},
    "diffusion_module_kwargs": {
        "atom_encoder_depth": 2,
        "token_transformer_depth": 2,
        "use_linear_attn": True,
        "atom_encoder_kwargs": {"attn_num_memory_kv": 3, "add_value_residual": True},
        "token_transformer_kwargs": {"attn_num_memory_kv": 2, "add_value_residual": True},
    },
}
REGISTERS = {"diffusion_module_kwargs": {"token_transformer_kwargs": {"num_register_tokens": 2}}}
CLAMP = {"attn_pair_bias_kwargs": {"enable_attn_softclamp": True, "attn_softclamp_value": 2.0}}
SOFTCLAMP = {"diffusion_module_kwargs": {"token_transformer_kwargs": CLAMP, "atom_encoder_kwargs": CLAMP}}
PRECISION = {
    "diffusion_module_kwargs": {"token_transformer_kwargs": {"attn_pair_bias_kwargs": {"softmax_full_precision": True}}}
}
# name -> lengths of the structures, arguments of the model
CASES = {
    "full-one": ((11,), {}),
    "full-two": ((11, 6), {}),
    "full-checkpointed": (
        (11, 6),
        {f"checkpoint_{part}": True for part in CHECKPOINTS} | {"msa_module_kwargs": {"depth": 2}},
    ),
    "value-residuals-memory-and-linear-attention": ((11, 6), EXTRAS),
    "register-tokens": ((11, 6), REGISTERS),
    "softclamp": ((11, 6), SOFTCLAMP),
    "softmax-in-full-precision": ((11, 6), PRECISION),
    "frame-averaging": ((9,), {"stochastic_frame_average": True}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, make_batch, make_model, step, step_in_float64):
    lengths, model_kwargs = request.param
    batch, model = make_batch(*lengths, confidence=True, seed=4), make_model(**model_kwargs)
    return model, batch, step(model, batch), step_in_float64(model, batch)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_loss_and_gradients_equal_the_stock_models(case, plan, step, beyond_budget, small_chunks):
    from megafold.model.optimize import optimize, restore

    model, batch, stock, exact = case
    assert any(name.startswith("confidence_head.") and g.abs().max() > 0 for name, g in exact[1].items())
    optimize(model, plan)
    try:
        found = step(model, batch)
    finally:
        restore(model)
    assert beyond_budget(found, stock, exact) == []
