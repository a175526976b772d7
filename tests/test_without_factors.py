"""CS equals a plain model with other initial weights, learning rate, eps and weight decay."""

import copy

import pytest
import torch

from scalelong_diffusers import UViTModel, skip_connections
from scalelong_diffusers.training import make_config


ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.3, "eps": 1e-3}


@pytest.fixture
def without_factors(project_root, monkeypatch):
    monkeypatch.syspath_prepend(str(project_root / "benchmarks"))
    from without_factors import EquivalentConfig, without_factors

    def run(model, of_cs):
        model = copy.deepcopy(model)
        names = {"learning_rate": "lr", "adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}
        options = {name: ADAM[key] for name, key in names.items()}
        options |= dict(zip(("adam_beta1", "adam_beta2"), ADAM["betas"]))
        optimizer = without_factors(model, make_config(EquivalentConfig, of_cs=of_cs, **options))
        assert all(skip.factor == 1 for skip in skip_connections(model))
        return train(model, optimizer)

    return run


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 6, "num_attention_heads": 2}
    return UViTModel(**sizes, skip_scaling={"method": "cs", "kappa": 0.6}).double()


def train(model, optimizer):
    """Train for some steps and return the losses."""
    torch.manual_seed(1)
    losses = []
    for _ in range(12):
        images, target = torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
        loss = (model(images, 10).sample - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_both_parts_together_equal_constant_scaling(without_factors, scaled):
    losses = without_factors(scaled, "both")
    assert losses == pytest.approx(
        train(scaled, torch.optim.AdamW(scaled.parameters(), **ADAM, fused=True)), abs=1e-10
    )


@pytest.mark.parametrize("of_cs", ["init", "rate"])
def test_one_part_alone_differs(without_factors, scaled, of_cs):
    losses = without_factors(scaled, of_cs)
    cs = train(scaled, torch.optim.AdamW(scaled.parameters(), **ADAM, fused=True))
    assert abs(losses[-1] - cs[-1]) > 1e-5
