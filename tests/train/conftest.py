"""What the tests of the train loop share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def improvement():
    """Function of (config, report): by loss term, loss of the trained over loss of the untrained model for each of nine
    examples, with equal noise and dropout. (The noise level of a step moves the loss more than some steps of training
    do, so the losses in a log say little.)"""
    import torch

    from megafold.evopipe.expand import expand
    from megafold.model.build import build_model
    from megafold.train import checkpoint
    from megafold.train.examples import open_stream
    from megafold.train.workload import arrange

    def evaluate(config, model, batches):
        terms = {"distogram": [], "diffusion_mse": []}
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            with torch.no_grad():
                _, breakdown = model(**arrange(batch, config.workload, 0), return_loss_breakdown=True)
            for term, values in terms.items():
                values.append(float(getattr(breakdown, term)))
        return terms

    def compare(config, report):
        torch.manual_seed(config.seed)
        model = build_model(config.model.preset, **config.model.overrides).train()
        stream = open_stream(config, model._args_and_kwargs[1])
        examples = [expand(next(stream)) for _ in range(9)]
        before = evaluate(config, model, examples)
        model.load_state_dict(checkpoint.load(report.checkpoint)["model"]["state_dict"])
        after = evaluate(config, model, examples)
        return {term: [b / a for a, b in zip(before[term], after[term])] for term in before}

    return compare
