"""Plans from configurations, presets and the models built from them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megafold.errors import InputError
from megafold.model.build import build_model, model_kwargs
from megafold.model.plan import Plan
from megafold.model.presets import PRESETS, preset


def test_plan_from_a_mapping_and_back():
    assert Plan.from_mapping(None) == Plan.from_mapping({}) == Plan()
    plan = Plan.from_mapping({"sdpa": False, "evoflash3d": True})
    assert plan == Plan(shared_conditioning=True, sdpa=False, evoflash3d=True)
    assert Plan.only("sdpa") == Plan.from_mapping({name: name == "sdpa" for name in Plan().as_dict()})
    assert Plan.from_mapping(plan.as_dict()) == plan
    assert not any(Plan.none().as_dict().values())


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"flash": True}, f"train.yaml: flash: unknown switch; known: {', '.join(Plan().as_dict())}"),
        ({"sdpa": 1}, "train.yaml: sdpa: found 1, expected true or false"),
        ({"sdpa": "yes"}, "train.yaml: sdpa: found 'yes', expected true or false"),
        (["sdpa"], "train.yaml: found ['sdpa'], expected a mapping of switches to true or false"),
    ],
    ids=["unknown", "number", "string", "list"],
)
def test_a_wrong_plan_is_told_in_one_line(mapping, message):
    with pytest.raises(InputError) as error:
        Plan.from_mapping(mapping, "train.yaml")
    assert str(error.value) == message


def test_presets_and_plans_load_without_torch():
    code = (
        "import sys, megafold.model.plan, megafold.model.presets as p; p.preset('paper'); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_an_unknown_preset_or_argument_is_told():
    with pytest.raises(InputError, match=r"unknown preset 'big'; known: paper, paper-0\.9b, paper-1\.8b, demo, tiny"):
        preset("big")
    with pytest.raises(InputError, match="model: dim_pears: alphafold3-pytorch's model has no such argument"):
        build_model("tiny", dim_pears=3)


@pytest.mark.parametrize("name, millions", [("paper", 456.7), ("paper-0.9b", 919.6), ("paper-1.8b", 1809.9)])
def test_sizes_have_the_parameters_that_they_are_named_for(name, millions):
    with torch.device("meta"):
        model = build_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_overrides_reach_into_nested_arguments_and_leave_the_preset_alone():
    kwargs = model_kwargs("paper", pairformer_stack={"depth": 2}, dim_single=16)
    assert kwargs["pairformer_stack"] == {**PRESETS["paper"]["pairformer_stack"], "depth": 2}
    assert (kwargs["dim_single"], PRESETS["paper"]["dim_single"]) == (16, 384)
    preset("paper")["pairformer_stack"]["depth"] = 1
    assert PRESETS["paper"]["pairformer_stack"]["depth"] == 48


def test_paper_is_the_published_model():
    import alphafold3_pytorch

    model = build_model("paper")
    assert sum(p.numel() for p in model.parameters()) == 456_701_750
    written, features = preset("paper"), {"dim_atom_inputs": 3, "dim_template_feats": 108}
    checkpoints = {key: True for key in written if key.startswith("checkpoint_")}
    stock = alphafold3_pytorch.Alphafold3.__init__.__wrapped__
    assert checkpoints.keys() == {
        "checkpoint_input_embedding",
        "checkpoint_trunk_pairformer",
        "checkpoint_diffusion_module",
        "checkpoint_confidence_head",
    }
    defaults = {**stock.__kwdefaults__, **features, **checkpoints}
    assert {key: defaults[key] for key in written} == written


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_small_presets_have_every_module_of_the_published_one(name):
    published = build_model(
        "paper",
        pairformer_stack={"depth": 1},
        msa_module_kwargs={"depth": 1},
        confidence_head_kwargs={"pairformer_depth": 1},
        diffusion_module_kwargs={"token_transformer_depth": 1},
    )
    kinds = [{type(module).__name__ for module in model.modules()} for model in (published, build_model(name))]
    assert kinds[0] == kinds[1]
    assert {"MSAModule", "TemplateEmbedder", "PairformerStack", "DiffusionTransformer", "ConfidenceHead"} <= kinds[1]
