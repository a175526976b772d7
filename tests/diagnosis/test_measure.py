"""The measurements against the paper's numbers and direct computations."""

import pytest
import torch

from scalelong_diffusers.diagnosis.figures import NOISE_LEVELS, Spread
from scalelong_diffusers.diagnosis.measure import (
    LargestActivations,
    Samples,
    data_figures,
    largest_by_depth,
    measure_skips,
    noise_sensitivity,
    sample_losses,
    skip_figures,
    spread_positions,
    with_skip_scaling,
)
from scalelong_diffusers.noise import EDMProcess, FlowProcess
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.scaling.factors import skip_energy


def test_positions_cover_the_schedule_evenly():
    for count in (8, 20, 64):
        bins = (spread_positions(0, count) * 4).long().bincount(minlength=4)
        assert (bins - count / 4).abs().max() <= 2
    torch.testing.assert_close(spread_positions(5, 3), spread_positions(0, 8)[5:])


def test_spread_of_numbers():
    spread = Spread.of(torch.tensor([1.0, 2.0, 3.0, 10.0, 4.0]))
    assert spread.mean == 4
    assert spread.variation == pytest.approx(10**0.5 / 4)
    assert spread.peak == pytest.approx(10 / 3)


def test_skips_do_not_depend_on_the_batch_size(build, batches, noising):
    model = build(skip_scaling="ls")
    whole = Samples(*(torch.cat([getattr(b, name) for b in batches]) for name in ("clean", "noise", "uniform",
                                                                                 "perturbation")))  # fmt: skip
    tables = [measure_skips(model, parts, noising) for parts in (batches, [whole])]
    torch.testing.assert_close(tables[0].values, tables[1].values, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(tables[0].largest, tables[1].largest, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tables[0].losses, tables[1].losses)


def test_losses_are_the_training_losses(build, batches, noising):
    model, batch = build(), batches[0]
    timesteps = (batch.uniform * 1000).long()
    noisy = noising.scheduler.add_noise(batch.clean, batch.noise, timesteps)
    with torch.no_grad():
        expected = (model(noisy, timesteps).sample - batch.noise).square().mean((1, 2, 3))
    torch.testing.assert_close(sample_losses(model, batch, noising).detach(), expected)


def test_frozen_models_have_gradients(build, batches, noising):
    table = measure_skips(build().requires_grad_(False), batches, noising)
    assert (table["skip_gradient"] > 0).all()


def test_data_of_the_lemma(build, batches, noising):
    """Lemma 3.2: x_0 uniform in [-1, 1] gives E|x_t|^2 = (1 - 2 E[abar] / 3) m."""
    model = build(num_layers=24, skip_scaling={"method": "cs", "kappa": 0.7})
    table = measure_skips(model, batches, noising)
    data, bins = data_figures(batches, noising, table, skip_figures(model, table))
    alphas = noising.scheduler.alphas_cumprod
    assert data.mean_square == pytest.approx(1 / 3, abs=0.02)
    assert data.lemma_power == pytest.approx(1 - 2 * alphas.mean().item() / 3, abs=0.01)
    assert data.expected_power == pytest.approx(data.lemma_power, abs=0.02)
    assert data.power == pytest.approx(data.expected_power, rel=0.02)
    assert data.skip_energy == pytest.approx(skip_energy(0.7, 12))
    assert skip_energy(data.kappa, 12) == pytest.approx(data.noise_ratio)
    assert data.upper_kappa == pytest.approx(0.9044, abs=5e-5)
    assert 1.2 < data.noise_ratio < data.highest_noise_ratio < 6
    assert [round(part.timestep, -2) for part in bins][::3] == [100, 400, 700, 1000]
    assert all(part.power == pytest.approx(part.expected_power, rel=0.05) for part in bins)


@pytest.mark.parametrize("process", [FlowProcess(shift=3), EDMProcess()], ids=["flow", "edm"])
def test_expected_energy_of_other_processes(build, batches, process):
    table = measure_skips(build(), batches, process)
    data, bins = data_figures(batches, process, table, skip_figures(build(), table))
    assert data.power == pytest.approx(data.expected_power, rel=0.03)
    assert data.expected_power == pytest.approx(data.lemma_power, abs=0.02)
    assert all(part.power == pytest.approx(part.expected_power, rel=0.05) for part in bins)
    powers = [part.power for part in bins]
    assert max(powers) - min(powers) > 0.2


def test_no_kappa_gives_a_target_that_is_not_between_1_and_n(build, batches, noising):
    loud = [Samples(3 * b.clean, b.noise, b.uniform, b.perturbation) for b in batches]
    model = build()
    table = measure_skips(model, loud, noising)
    data, _ = data_figures(loud, noising, table, skip_figures(model, table))
    assert data.noise_ratio < 1
    assert data.kappa is None
    assert data.upper_kappa is None  # two skips cannot give S = 5


def test_largest_activations_are_found_in_their_block(build, batches, noising):
    model = build()
    activations = LargestActivations(model)
    assert list(activations.blocks) == [
        "patch_embed", "in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1", "norm", "proj_out",
        "conv_out",
    ]  # fmt: skip
    with torch.no_grad():
        model.mid_block.mlp.fc1.bias[3] = 777
    table = measure_skips(model, batches, noising)
    by_block = dict(zip(table.blocks, table.largest.amin(1).tolist()))
    assert by_block["mid_block"] == pytest.approx(777, abs=5)
    assert max(value for name, value in by_block.items() if name != "mid_block") < 700


def test_sensitivity_is_the_change_of_the_output(build, batches, noising):
    model, batch = build(), batches[0]
    timesteps = (batch.uniform * 1000).long()
    noisy = noising.add_noise(batch.clean, batch.noise, timesteps)
    changes = noise_sensitivity(model, batch, noising)
    with torch.no_grad():
        moved = model(noisy + NOISE_LEVELS[2] * batch.perturbation, timesteps).sample
        expected = (moved - model(noisy, timesteps).sample).square().mean().sqrt()
    assert changes[2] == pytest.approx(expected.item())
    assert changes == sorted(changes)


def test_another_scaling_is_undone(build):
    model = build(skip_scaling={"method": "ls", "init": "paper"})
    config, scaler, before = dict(model.config), model.skip_scaler, model.state_dict()
    inputs = torch.ones(2, 3, 8, 8), torch.tensor([3, 700])
    with torch.no_grad():
        expected = model(*inputs).sample
        with with_skip_scaling(model, SkipScalingConfig("none")):
            plain = model(*inputs).sample
            assert model.skip_scaler is scaler
        torch.testing.assert_close(model(*inputs).sample, expected, rtol=0, atol=0)
        reference = build()
        reference.load_state_dict({n: v for n, v in before.items() if not n.startswith("skip_scaler")}, strict=False)
        torch.testing.assert_close(reference(*inputs).sample, plain)
    assert not torch.equal(plain, expected)
    assert dict(model.config) == config
    assert model.state_dict().keys() == before.keys()


def test_untrained_models_by_depth(build, batches, noising, ddpm):
    state = torch.random.get_rng_state()
    model = build(skip_init="sum", block_scale="rezero")
    torch.random.set_rng_state(state)
    found = largest_by_depth(model, batches[0].first(2), noising)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(found) == [12, 28, 48]
    assert found[12] < found[28] < found[48]  # the sum of all skips grows with their number
    assert largest_by_depth(ddpm.build_scaled("cs"), batches[0], noising) == {}
