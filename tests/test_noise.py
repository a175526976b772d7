"""The noise process against diffusers' schedulers and the equations of the SDE."""

import pytest
import torch
from diffusers import DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.noise import BETA_PREDICTION_TYPES, BETA_SCHEDULES, NoiseProcess, noise_process
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.training import TrainingConfig, make_config


CLEAN, NOISE = torch.randn(2, 7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
STEPS = torch.tensor([0, 1, 10, 250, 500, 998, 999])


def process_of(**options) -> NoiseProcess:
    config = make_config(TrainingConfig, **options)
    return noise_process(config.noise, config.optimization.snr_gamma)


def test_equals_the_scheduler_that_samples():
    for schedule in BETA_SCHEDULES:
        for prediction_type in BETA_PREDICTION_TYPES:
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


@pytest.mark.parametrize("prediction_type", BETA_PREDICTION_TYPES)
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


UNIFORM = (torch.arange(1000) + 0.5) / 1000


def test_flow_equals_the_scheduler_that_samples():
    process = process_of(prediction_type="flow", flow_shift=3.0)
    scheduler = process.sampling_scheduler()
    assert scheduler.config.shift == 3
    timesteps = scheduler.timesteps[torch.tensor([0, 1, 10, 250, 500, 998, 999])]
    noisy = process.add_noise(CLEAN, NOISE, timesteps)
    torch.testing.assert_close(noisy, FlowMatchEulerDiscreteScheduler(shift=3.0).scale_noise(CLEAN, timesteps, NOISE))
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy - sigmas * process.target(CLEAN, NOISE, timesteps), CLEAN)


def test_times_of_flow():
    """The shift and the logit-normal distribution, against their definitions."""
    times = process_of(prediction_type="flow").timesteps(UNIFORM) / 1000
    torch.testing.assert_close(times, UNIFORM)
    shifted = process_of(prediction_type="flow", flow_shift=3.0).timesteps(UNIFORM) / 1000
    torch.testing.assert_close(shifted, 3 * UNIFORM / (1 + 2 * UNIFORM))
    options = {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 2.0}
    logits = (process_of(prediction_type="flow", **options).timesteps(UNIFORM) / 1000).logit()
    assert logits.mean() == pytest.approx(0.5, abs=0.01)
    assert logits.std() == pytest.approx(2, abs=0.02)


def test_edm_equals_the_scheduler_that_samples():
    process = process_of(prediction_type="edm", edm_sigma_data=0.7)
    scheduler = EDMEulerScheduler(sigma_data=0.7)
    sigmas = torch.tensor([0.002, 0.01, 0.1, 0.5, 1.0, 10.0, 80.0]).view(-1, 1, 1, 1)
    timesteps = scheduler.precondition_noise(sigmas).flatten()
    noisy = CLEAN + sigmas * NOISE
    torch.testing.assert_close(
        process.add_noise(CLEAN, NOISE, timesteps), scheduler.precondition_inputs(noisy, sigmas)
    )
    target = process.target(CLEAN, NOISE, timesteps)
    torch.testing.assert_close(scheduler.precondition_outputs(noisy, target, sigmas), CLEAN)
    assert process.sampling_scheduler().config.sigma_data == 0.7


def test_sigmas_of_edm_are_log_normal():
    options = {"edm_p_mean": -0.4, "edm_p_std": 0.8}
    timesteps = process_of(prediction_type="edm", **options).timesteps(UNIFORM)
    assert (4 * timesteps).mean() == pytest.approx(-0.4, abs=1e-3)
    assert (4 * timesteps).std() == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("options", [{"weighting_scheme": "logit_normal"}, {"flow_shift": 0.3}, {}])
def test_timesteps_rise_with_the_noise_and_are_finite(options):
    """Validation counts tenths of [0, 1) as tenths of the noise levels."""
    for prediction_type in ("flow", "edm"):
        process = process_of(prediction_type=prediction_type, **(options if prediction_type == "flow" else {}))
        timesteps = process.timesteps(torch.tensor([0.0, 0.1, 0.5, 0.9, 1 - 2**-24]))
        assert timesteps.isfinite().all()
        assert (timesteps.diff() > 0).all()
        assert process.weights(timesteps).tolist() == [1] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction_type": "flow", "continuous_time": True}, "continuous_time True has no effect with .* flow"),
        ({"prediction_type": "edm", "flow_shift": 2.0}, "flow_shift 2.0 has no effect with prediction_type edm"),
        ({"edm_p_mean": 0.0}, "edm_p_mean 0.0 has no effect with prediction_type epsilon"),
        ({"prediction_type": "flow", "snr_gamma": 5.0}, "snr_gamma 5.0 has no effect with prediction_type flow"),
        ({"prediction_type": "flow", "flow_shift": 0.0}, "flow_shift must be a number, above 0"),
        ({"prediction_type": "edm", "edm_sigma_data": -1.0}, "edm_sigma_data must be a number, above 0"),
        ({"prediction_type": "flows"}, "prediction_type must be .*flow"),
    ],
)
def test_options_of_another_process_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        process_of(**options)


def test_preset_with_another_process():
    process = process_of(preset="cifar10-uvit-s-2", prediction_type="flow")
    torch.testing.assert_close(process.timesteps(UNIFORM), 1000 * UNIFORM)
    assert process_of(preset="cifar10-uvit-s-2", prediction_type="v_prediction").continuous
