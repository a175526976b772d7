"""Sampling with schedulers without betas, from a model that knows the images."""

import pytest
import torch

from scalelong_diffusers import ScaleLongUnconditionalPipeline, UViTModel
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.noise import EDMProcess, FlowProcess, trained_process
from scalelong_diffusers.pipelines.sampling import scheduler_by_name


IMAGE = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
PROCESSES = {"flow": FlowProcess(), "shifted flow": FlowProcess(shift=3.0), "edm": EDMProcess(sigma_data=0.6)}


class Oracle(UViTModel):
    """Predicts what a perfect model of a dataset with one image predicts."""

    def forward(self, sample, timestep, **kwargs):
        timesteps = torch.as_tensor(timestep).expand(len(sample))
        alpha, sigma = self.process._alpha_sigma_like(sample, timesteps)
        noise = (sample - alpha * IMAGE) / sigma
        assert noise.std() < 1.5  # the input is noised as in training
        return (self.process.target(IMAGE, noise, timesteps),)


@pytest.fixture(params=PROCESSES)
def pipe(request):
    process = PROCESSES[request.param]
    model = Oracle(sample_size=4, hidden_size=8, num_layers=2, num_attention_heads=2)
    model.process = process
    pipe = ScaleLongUnconditionalPipeline(model, process.sampling_scheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe, **options):
    return pipe(2, generator=torch.Generator().manual_seed(0), output_type="pt", **options).images


def check(pipe, **options):
    images = sample(pipe, **options)
    torch.testing.assert_close(images, (IMAGE / 2 + 0.5).expand_as(images), rtol=0, atol=2e-3)


def test_a_perfect_model_gives_the_image(pipe):
    check(pipe, num_inference_steps=10)


def test_other_schedulers_of_the_process(pipe):
    others = {"euler", "heun"} if isinstance(pipe.unet.process, FlowProcess) else {"euler", "dpm++"}
    for name in others:
        pipe.scheduler = scheduler_by_name(name, pipe.scheduler)
        check(pipe, num_inference_steps=10)
        assert type(trained_process(pipe)) is type(pipe.unet.process)


def test_schedulers_with_betas_are_refused(pipe):
    own = type(pipe.scheduler).__name__
    with pytest.raises(UserError, match=f"'ddim' needs a beta schedule, .*{own} does not have; it can be replaced by"):
        scheduler_by_name("ddim", pipe.scheduler)
