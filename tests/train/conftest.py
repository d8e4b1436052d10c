"""What the tests of the train loop share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def terms_before_and_after():
    """Function of (config, report): loss terms of the untrained and the trained model for the same examples, noise and
    dropout, as two dictionaries of means. The noise level of a step moves the loss more than some steps of training do,
    so losses from a log say little."""
    import torch

    from megafold.model.build import build_model
    from megafold.train import checkpoint
    from megafold.train.examples import open_stream
    from megafold.train.workload import arrange

    def evaluate(config, model, batches):
        sums = {"distogram": 0.0, "diffusion_mse": 0.0}
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            with torch.no_grad():
                _, breakdown = model(**arrange(batch, config.workload, 0), return_loss_breakdown=True)
            for term in sums:
                sums[term] += float(getattr(breakdown, term)) / len(batches)
        return sums

    def compare(config, report, batches=9):
        torch.manual_seed(config.seed)
        model = build_model(config.model.preset, **config.model.overrides).train()
        stream = open_stream(config, model._args_and_kwargs[1])
        examples = [next(stream) for _ in range(batches)]
        before = evaluate(config, model, examples)
        model.load_state_dict(checkpoint.load(report.checkpoint)["model"]["state_dict"])
        return before, evaluate(config, model, examples)

    return compare
