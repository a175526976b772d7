"""The loop of a diffusers training script, with the lines of docs/diffusers_training_scripts.md."""

import os
import sys

import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from diffusers.training_utils import EMAModel

from scalelong_diffusers import apply_skip_scaling


STEPS = 4


def train(base, folder, entry, *, until, resume_from=None):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    apply_skip_scaling(unet, entry)  # recipe, 1
    unet_class = type(unet)  # recipe, 1
    unet.train()
    ema_unet = EMAModel(unet.parameters(), decay=0.9, model_cls=unet_class, model_config=unet.config)  # recipe, 2
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    unet, optimizer = accelerator.prepare(unet, optimizer)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            ema_unet.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for model in models:
                accelerator.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models, input_dir):
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), unet_class)  # recipe, 2
        ema_unet.load_state_dict(loaded.state_dict())
        while models:
            model = accelerator.unwrap_model(models.pop())
            loaded = unet_class.from_pretrained(input_dir, subfolder="unet")  # recipe, 3
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    first = 0
    if resume_from is not None:
        accelerator.load_state(resume_from)
        first = STEPS // 2
    batch = torch.Generator().manual_seed(2)
    inputs = {"sample": torch.randn(2, 4, 8, 8, generator=batch), "timestep": torch.tensor([10, 500])}
    text, noise = torch.randn(2, 5, 16, generator=batch), torch.randn(2, 4, 8, 8, generator=batch)
    for _ in range(first, until):
        loss = torch.nn.functional.mse_loss(unet(**inputs, encoder_hidden_states=text).sample, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema_unet.step(unet.parameters())
    accelerator.save_state(os.path.join(folder, "checkpoint"))
    unet = accelerator.unwrap_model(unet)
    ema_unet.copy_to(unet.parameters())
    if accelerator.is_main_process:
        unet.save_pretrained(os.path.join(folder, "unet"))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    base, folder, method = sys.argv[1:]
    train(base, os.path.join(folder, "broken"), method, until=STEPS // 2)
    checkpoint = os.path.join(folder, "broken", "checkpoint")
    train(base, os.path.join(folder, "resumed"), method, until=STEPS, resume_from=checkpoint)
