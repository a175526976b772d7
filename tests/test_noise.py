"""The noise process against diffusers' schedulers and the equations of the SDE."""

import pytest
import torch
from diffusers import DDPMScheduler

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.noise import BETA_SCHEDULES, PREDICTION_TYPES
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.training import NoiseProcess, TrainingConfig, make_config


CLEAN, NOISE = torch.randn(2, 7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
STEPS = torch.tensor([0, 1, 10, 250, 500, 998, 999])


def process_of(**options) -> NoiseProcess:
    config = make_config(TrainingConfig, **options)
    noise = config.noise
    return NoiseProcess.from_options(
        noise.ddpm_beta_schedule, noise.prediction_type, noise.continuous_time, config.optimization.snr_gamma
    )


def test_equals_the_scheduler_that_samples():
    for schedule in BETA_SCHEDULES:
        for prediction_type in PREDICTION_TYPES:
            process = process_of(ddpm_beta_schedule=schedule, prediction_type=prediction_type)
            scheduler = DDPMScheduler(
                beta_schedule=schedule, prediction_type=prediction_type, **BETA_SCHEDULES[schedule]
            )
            expected = scheduler.add_noise(CLEAN, NOISE, STEPS)
            torch.testing.assert_close(process.add_noise(CLEAN, NOISE, STEPS), expected)
            target = {
                "epsilon": NOISE,
                "sample": CLEAN,
                "v_prediction": scheduler.get_velocity(CLEAN, NOISE, STEPS),
            }[prediction_type]
            torch.testing.assert_close(process.target(CLEAN, NOISE, STEPS), target)


def test_timesteps_are_uniform():
    uniform = torch.tensor([0.0, 0.0005, 0.001, 0.5, 0.9999])
    assert process_of().timesteps(uniform).tolist() == [0, 0, 1, 500, 999]


def test_continuous_time_solves_the_sde():
    """alpha^2 = exp(-integral of beta), here integrated numerically, and 1000 t - 1 is the timestep."""
    process = process_of(continuous_time=True)
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


def test_continuous_time_agrees_with_discrete_steps():
    steps = torch.arange(0, 1000, 37)
    ones = torch.ones(len(steps), 1)
    continuous, discrete = (process_of(continuous_time=on).add_noise(ones, 0 * ones, steps) for on in (True, False))
    torch.testing.assert_close(continuous, discrete, rtol=0, atol=2e-3)


def test_continuous_time_rejects_other_schedules():
    with pytest.raises(UserError, match="--continuous_time needs --ddpm_beta_schedule linear, got scaled_linear"):
        process_of(continuous_time=True, ddpm_beta_schedule="scaled_linear")


def test_preset_shows_999_t_to_the_network():
    config = get_preset("cifar10-uvit-s-2").config
    process = process_of(preset="cifar10-uvit-s-2")
    t = torch.rand(5)
    shown = (process.timesteps(t) + config["timestep_offset"]) * config["timestep_scale"]
    torch.testing.assert_close(shown, 999 * t, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_min_snr_weights_the_error_of_x(prediction_type):
    """The weighted loss of every prediction type is min(SNR, gamma) times the squared error of x."""
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
    error = ((x - CLEAN) ** 2).mean(dim=(1, 2, 3)) * (alphas / (1 - alphas)).flatten().clamp(max=5)
    loss = torch.full((7,), 0.01, dtype=torch.float64) * process.weights(STEPS)
    torch.testing.assert_close(loss, error, rtol=2e-3, atol=1e-6)


def test_weights_are_equal_without_gamma():
    assert process_of().weights(STEPS).tolist() == [1] * 7
