"""docs/diffusers_training_scripts.md: the hooks, EMA and resuming of diffusers' scripts, with the lines it adds."""

import os
import warnings

import pytest
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from diffusers.training_utils import EMAModel

from scalelong_diffusers import ScaleLongUNet2DConditionModel, apply_skip_scaling


STEPS = 4


def train(base, folder, entry, inputs, *, until, resume_from=None):
    """What a script of diffusers does around its loop; the lines of the recipe are marked."""
    accelerator = Accelerator(project_dir=folder)
    torch.manual_seed(1)
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    apply_skip_scaling(unet, entry)  # recipe, 1
    unet.train()
    ema_unet = EMAModel(unet.parameters(), decay=0.9, model_cls=type(unet), model_config=unet.config)  # recipe, 2
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    unet, optimizer = accelerator.prepare(unet, optimizer)

    def save_model_hook(models, weights, output_dir):
        ema_unet.save_pretrained(os.path.join(output_dir, "unet_ema"))
        for model in models:
            accelerator.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
            weights.pop()

    def load_model_hook(models, input_dir):
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), type(unet))  # recipe, 2
        ema_unet.load_state_dict(loaded.state_dict())
        while models:
            model = models.pop()
            loaded = type(model).from_pretrained(input_dir, subfolder="unet")  # recipe, 3
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    first = 0
    if resume_from is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # of diffusers, about its own call
            accelerator.load_state(resume_from)
        first = STEPS // 2
    noise = torch.randn(inputs["sample"].shape, generator=torch.Generator().manual_seed(2))
    for _ in range(first, until):
        loss = torch.nn.functional.mse_loss(unet(**inputs).sample, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema_unet.step(unet.parameters())
    accelerator.save_state(os.path.join(folder, "checkpoint"))
    unet = accelerator.unwrap_model(unet)
    ema_unet.copy_to(unet.parameters())
    unet.save_pretrained(os.path.join(folder, "unet"))
    return unet


@pytest.mark.parametrize("entry", ["cs", {"method": "ls", "reduction": 4, "init": "identity"}], ids=["cs", "ls"])
def test_a_script_of_diffusers_trains_resumes_and_saves_scaled(sd, entry, tmp_path):
    sd.build().save_pretrained(tmp_path / "base" / "unet")
    inputs = sd.make_inputs()
    unbroken = train(tmp_path / "base", tmp_path / "unbroken", entry, inputs, until=STEPS)
    train(tmp_path / "base", tmp_path / "broken", entry, inputs, until=STEPS // 2)
    checkpoint = tmp_path / "broken" / "checkpoint"
    resumed = train(tmp_path / "base", tmp_path / "resumed", entry, inputs, until=STEPS, resume_from=checkpoint)

    reloaded = ScaleLongUNet2DConditionModel.from_pretrained(tmp_path / "resumed" / "unet")
    assert reloaded.config.skip_scaling == unbroken.config.skip_scaling
    start = ScaleLongUNet2DConditionModel.from_pretrained(tmp_path / "base", subfolder="unet", skip_scaling=entry)
    for (name, weight), expected, first in zip(
        reloaded.named_parameters(), unbroken.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5, msg=name)
        if name.endswith("fc2.weight"):
            assert not torch.equal(weight, first), f"{name} did not learn, or EMA lost it"
    assert type(resumed) is ScaleLongUNet2DConditionModel
