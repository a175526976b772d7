r"""
Train a text-to-image diffusion model with scaled long skips: a U-ViT or a diffusers U-Net.

    accelerate launch train/train_text_to_image.py --train_data_dir pictures_with_captions --resolution 64 \
        --pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_text_to_image --preset mscoco-uvit-s-2 \
        --dataset_name user/coco --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema \
        --pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14

Without a text encoder, the script builds a small CLIP from the captions and trains it along with the model. Without a
dataset, the script trains on shapes that the package draws. The output folder is a pipeline:
`ScaleLongTextToImagePipeline.from_pretrained("out")("a red circle")`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import ScaleLongTextToImagePipeline
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, option, parse_config, run_script
from scalelong_diffusers.training.text import TextCondition, grid_prompts, held_out_captions


@dataclass(frozen=True)
class TextToImageConfig(TrainingConfig):
    task = "text-to-image"

    pretrained_text_encoder_name_or_path: str | None = option(
        None,
        "a CLIP text encoder, or a pipeline that has one",
        metavar="PATH",
        common=True,
    )
    train_text_encoder: bool = option(
        False, "also train the text encoder; a small one built from the captions is always trained", on_resume="fixed"
    )
    proportion_empty_prompts: float = option(
        0.1, "probability of replacing a caption with the empty text, for guidance", at_least=0, below=1
    )
    validation_prompts: tuple[str, ...] | None = option(
        None,
        "prompts of sample grids (default: held-out captions)",
        metavar="TEXT",
        on_resume="free",
        common=True,
    )
    guidance_scale: float = option(4.0, "guidance of sample grids; 1 turns it off", at_least=0, at_most=1000)


def train(config: TextToImageConfig):
    run = TrainingRun(config)
    vae = run.load_vae()
    data = run.load_data(needs_captions=True)
    text = TextCondition(run)
    unet = run.build_model(text=text.model_config)
    text_encoder, tokenizer = text.prepare(unet)
    noising = run.noise_process()

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        states = text.hidden_states(models, batch)
        noisy = noising.add_noise(clean, noise, timesteps)
        prediction = models["unet"](noisy, timesteps, encoder_hidden_states=states).sample
        target = noising.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return noising.weights(timesteps) * losses

    def pipeline() -> ScaleLongTextToImagePipeline:
        scheduler = noising.sampling_scheduler()
        pipe = ScaleLongTextToImagePipeline(
            unet, scheduler, text_encoder, tokenizer, vae, latent_scale=config.model.latent_scale
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def samples(numbers: Sequence[int], prompts: Sequence[str]) -> list:
        return pipeline()(
            [prompts[k % len(prompts)] for k in numbers],
            num_inference_steps=config.monitoring.num_inference_steps,
            guidance_scale=config.guidance_scale,
            generator=run.generators(numbers),
        ).images

    trained = {"unet": unet} | ({"text_encoder": text_encoder} if text.is_trained else {})
    run.start(trained, pipeline=pipeline)
    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
        if run.is_due(config.monitoring.sample_steps):
            prompts = grid_prompts(config.validation_prompts, data, config.monitoring.num_samples)
            run.save_samples(partial(samples, prompts=prompts), prompts)
        if run.is_due(config.monitoring.eval_steps):
            run.evaluate(partial(samples, prompts=held_out_captions(data)))

    run.save(pipeline())


def main(argv: Sequence[str] | None = None):
    train(parse_config(TextToImageConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
