"""What the tests ask of tiny pipelines."""

import pytest
import torch


@pytest.fixture(params=["sd1", "sd2", "sdxl"])
def kind(request):
    return request.param


@pytest.fixture
def draw():
    """`draw(pipe)`: an image, from the same noise each time."""

    def run(pipe, prompt="a red circle"):
        generator = torch.Generator().manual_seed(0)
        return pipe(prompt, num_inference_steps=2, generator=generator, output_type="pt").images

    return run


@pytest.fixture
def predict():
    """`predict(pipe, arguments)`: what the U-Net says of the same latents each time."""

    def run(pipe, arguments):
        generator = torch.Generator().manual_seed(0)
        count = len(arguments["encoder_hidden_states"])
        latents = torch.randn(count, 4, 8, 8, generator=generator)
        with torch.no_grad():
            return pipe.unet(latents, torch.arange(count) * 300, **arguments).sample

    return run
