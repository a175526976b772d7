"""A step of diffusers' `train_unconditional.py` with the stock class, for benchmarks/training.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from scalelong_diffusers import remove_skip_scaling
from scalelong_diffusers.training import NoiseProcess, TrainingRun


def published_step(run: TrainingRun, process: NoiseProcess) -> Callable[[], None]:
    """
    Return a step with the model, the images and the batch size of a run that trains an unconditional U-Net.

    It has what the script has by default and `--use_ema`: AdamW and the EMA of one weight after the other, clipping,
    and a loss that is read in each step. Its images are in memory, so they cost less than the script's.
    """
    accelerator = Accelerator(mixed_precision=run.accelerator.mixed_precision)
    model = remove_skip_scaling(run.build_model()).train()
    ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=10**6)
    images = next(iter(run.data.train.batches(batch_size=run.size.train_batch_size)))["pixel_values"]
    loader = torch.utils.data.DataLoader(images, batch_size=len(images), shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def step():
        for clean in loader:
            noise = torch.randn_like(clean)
            timesteps = torch.randint(0, 1000, (len(clean),))
            with accelerator.accumulate(model):
                prediction = model(process.add_noise(clean, noise, timesteps), timesteps).sample
                loss = F.mse_loss(prediction.float(), noise.float())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ema.step(model.parameters())
            loss.detach().item()

    return step
