"""The noise process against diffusers' schedulers and the equations of the SDE."""

import pytest
import torch
from diffusers import DDPMScheduler

from scalelong_diffusers.training import NoiseProcess, parse_training_arguments, training_parser
from scalelong_diffusers.training.noise import BETA_SCHEDULES, PREDICTION_TYPES


CLEAN, NOISE = torch.randn(2, 7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
STEPS = torch.tensor([0, 1, 10, 250, 500, 998, 999])


def process_of(**flags):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return NoiseProcess.from_arguments(parse_training_arguments(training_parser("", condition=None), words))


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
def test_it_is_that_of_the_scheduler(schedule, prediction_type):
    process = process_of(ddpm_beta_schedule=schedule, prediction_type=prediction_type)
    scheduler = DDPMScheduler(
        beta_schedule=schedule, prediction_type=prediction_type, **BETA_SCHEDULES[schedule]
    )  # which is what the pipeline samples with
    torch.testing.assert_close(process.add_noise(CLEAN, NOISE, STEPS), scheduler.add_noise(CLEAN, NOISE, STEPS))
    wanted = {
        "epsilon": NOISE,
        "sample": CLEAN,
        "v_prediction": scheduler.get_velocity(CLEAN, NOISE, STEPS),
    }[prediction_type]
    torch.testing.assert_close(process.target(CLEAN, NOISE, STEPS), wanted)


def test_timesteps_are_uniform():
    process = NoiseProcess(DDPMScheduler().config)
    assert process.timesteps(torch.tensor([0.0, 0.0005, 0.001, 0.5, 0.9999])).tolist() == [0, 0, 1, 500, 999]


def test_continuous_time_is_the_sde():
    """alpha^2 = exp(-integral of beta), here integrated numerically, and t * 1000 - 1 is the timestep."""
    process = NoiseProcess(DDPMScheduler().config, continuous=True)
    t = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    timesteps = process.timesteps(t)
    torch.testing.assert_close(timesteps, 1000 * t - 1)
    signal = process.add_noise(torch.ones(5, 1), torch.zeros(5, 1), timesteps).flatten()
    for time, alpha in zip(t.tolist(), signal.tolist()):
        grid = torch.linspace(0, time, 10_001, dtype=torch.float64)
        integral = torch.trapezoid(0.1 + (20 - 0.1) * grid, grid)
        assert alpha == pytest.approx(float(torch.exp(-integral / 2)), abs=1e-6)
    noise = process.add_noise(torch.zeros(5, 1), torch.ones(5, 1), timesteps).flatten()
    torch.testing.assert_close(signal**2 + noise**2, torch.ones(5))


def test_continuous_time_meets_the_steps_that_are_sampled():
    continuous = NoiseProcess(DDPMScheduler().config, continuous=True)
    steps = NoiseProcess(DDPMScheduler().config)
    at = torch.arange(0, 1000, 37)
    ones = torch.ones(len(at), 1)
    torch.testing.assert_close(
        continuous.add_noise(ones, 0 * ones, at), steps.add_noise(ones, 0 * ones, at), rtol=0, atol=2e-3
    )


def test_the_preset_shows_the_network_999_t():
    """U-ViT's pixel models: the network is shown 999 t for t in (0, 1)."""
    from scalelong_diffusers.presets import get_preset

    config = get_preset("cifar10-uvit-s-2").config
    process = process_of(preset="cifar10-uvit-s-2")
    t = torch.rand(5)
    shown = (process.timesteps(t) + config["timestep_offset"]) * config["timestep_scale"]
    torch.testing.assert_close(shown, 999 * t, rtol=1e-5, atol=1e-3)


def test_continuous_time_has_linear_betas():
    with pytest.raises(ValueError, match="continuous form of linear betas, got --ddpm_beta_schedule scaled_linear"):
        NoiseProcess({"beta_schedule": "scaled_linear"}, continuous=True)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_min_snr_weights_the_same_error_of_x_alike(prediction_type):
    """Whatever is predicted, the weighted loss is min(SNR, gamma) times the squared error of x that it means."""
    process = process_of(prediction_type=prediction_type, snr_gamma=5)
    noisy = process.add_noise(CLEAN, NOISE, STEPS)
    prediction = process.target(CLEAN, NOISE, STEPS) + 0.1
    alphas = DDPMScheduler().alphas_cumprod.double()[STEPS].view(-1, 1, 1, 1)
    alpha, sigma = alphas.sqrt(), (1 - alphas).sqrt()
    x = {
        "epsilon": (noisy - sigma * prediction) / alpha,
        "sample": prediction.double(),
        "v_prediction": alpha * noisy - sigma * prediction,
    }[prediction_type]
    of_x = ((x - CLEAN) ** 2).mean(dim=(1, 2, 3)) * (alphas / (1 - alphas)).flatten().clamp(max=5)
    of_prediction = torch.full((7,), 0.01, dtype=torch.float64) * process.weights(STEPS)
    torch.testing.assert_close(of_prediction, of_x, rtol=2e-3, atol=1e-6)


def test_without_gamma_all_timesteps_weigh_alike():
    assert NoiseProcess(DDPMScheduler().config).weights(STEPS).tolist() == [1] * 7
