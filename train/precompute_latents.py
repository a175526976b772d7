"""
Write once what the encoders make of a data set, so that training need not do it in every epoch.

    accelerate launch train/precompute_latents.py --train_data_dir flowers --resolution 256 --center_crop \
        --random_flip --with_labels --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema --output_dir latents
    accelerate launch train/train_class_conditional.py --precomputed_dir latents --resolution 256 --center_crop \
        --random_flip --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema --output_dir out

What is written of an image are the means and log variances of its latents, which training draws from anew each time.
The same command goes on where it was killed.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from tqdm import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.arguments import ArgumentParser
from scalelong_diffusers.data import Batch, DataConfig, TrainingData, add_data_arguments, load_training_data
from scalelong_diffusers.data.precomputed import transform_of
from scalelong_diffusers.pipelines.text_encoding import hidden_states, max_tokens, tokenize
from scalelong_diffusers.processes import run_on_all_processes
from scalelong_diffusers.training import check_processes, load_vae, mistakes_as_sentences, run_script
from scalelong_diffusers.training.latents import moments_of, text_encoder_checksum, weights_checksum
from scalelong_diffusers.training.loop import on_main_process
from scalelong_diffusers.training.precomputing import FeatureWriter, ShardToWrite
from scalelong_diffusers.training.text import TextEncoder, load_named_text_encoder


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# Which images are held out or left out is for training to say.
_OF_TRAINING = ("precomputed_dir", "max_train_samples", "validation_size")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Write once what the encoders make of a data set.")
    add = parser.add_argument
    add("--pretrained_vae_model_name_or_path", metavar="PATH", required=True, help="an autoencoder")
    add("--pretrained_text_encoder_name_or_path", metavar="PATH", help="a CLIP, which reads all captions")
    add("--with_labels", action="store_true", help="write the classes too")
    add("--output_dir", required=True, help="becomes the --precomputed_dir of training")
    add("--batch_size", type=int, default=16, help="images in each process at a time")
    add("--rows_per_shard", type=int, default=1024)
    add("--dtype", choices=tuple(_DTYPES), default="fp32", help="fp16 takes half the room, and is not exact")
    add_data_arguments(parser, without=_OF_TRAINING)
    parser.set_defaults(train_text_encoder=False)
    args = parser.parse_args(argv)
    for name in ("batch_size", "rows_per_shard"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not args.center_crop:
        parser.error("features are of one crop of each image, not of a new one in each epoch: give --center_crop")
    return args


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    with mistakes_as_sentences(interrupted="interrupted; the same command goes on"):
        accelerator = Accelerator()
        check_processes(accelerator)
        vae = load_vae(args, accelerator)
        text = load_named_text_encoder(args, accelerator)
        data = load_training_data(
            DataConfig.from_arguments(args),
            channels=vae.config.in_channels,
            needs_labels=args.with_labels,
            needs_captions=text is not None,
            seed=0,
        )
        writer = FeatureWriter(Path(args.output_dir), data, made_of(args, data, vae, text), args.on_bad_image)
        write(args, accelerator, writer, vae, text)
    accelerator.end_training()


def write(
    args: argparse.Namespace,
    accelerator: Accelerator,
    writer: FeatureWriter,
    vae: AutoencoderKL,
    text: TextEncoder | None,
):
    dtype = _DTYPES[args.dtype]

    def encode(batch: Batch) -> dict[str, torch.Tensor | list]:
        pixels = batch["pixel_values"].to(accelerator.device)
        columns = {"moments": moments_of(pixels, vae)}
        if args.random_flip:
            columns["mirrored_moments"] = moments_of(pixels.flip(-1), vae)
        if text is not None:
            columns["text_features"] = states_of([caption for row in batch["all_captions"] for caption in row], text)
        others = {name: batch[name] for name in batch.columns if name != "pixel_values"}
        return others | {name: column.to("cpu", dtype) for name, column in columns.items()}

    def write_shard(shard: ShardToWrite | None):
        if shard is not None and not shard.is_complete():
            shard.write([encode(batch) for batch in shard.batches(args.batch_size, args.dataloader_num_workers)])

    on_main_process(accelerator, writer.begin)
    if text is not None:
        on_main_process(accelerator, lambda: writer.write_empty_caption(states_of([""], text)[0].to("cpu", dtype)))
    # In turns: what one process can not encode ends all of them then, and not when the others are through.
    turns = writer.turns(accelerator.process_index, accelerator.num_processes)
    for shard in tqdm(turns, desc="shards", disable=not accelerator.is_local_main_process):
        run_on_all_processes(partial(write_shard, shard))
    size = on_main_process(accelerator, writer.finish)
    accelerator.print(f"{writer.images['description']}: {size / 2**20:,.1f} MiB of features in {args.output_dir}")


def made_of(
    args: argparse.Namespace, data: TrainingData, vae: AutoencoderKL, text: TextEncoder | None
) -> dict[str, Any]:
    """What is kept with the features, to know them by."""
    columns = {"mirrored_moments": args.random_flip, "labels": args.with_labels, "text_features": text is not None}
    return {
        "autoencoder": {"name": args.pretrained_vae_model_name_or_path, "checksum": weights_checksum(vae)},
        "text_encoder": None if text is None else describe_text(args, *text),
        "transform": transform_of(DataConfig.from_arguments(args), data.channels),
        "data": data.fingerprint,
        "columns": ["moments", *(name for name, wanted in columns.items() if wanted)],
        "dtype": args.dtype,
        "rows_per_shard": args.rows_per_shard,
    }


def describe_text(args: argparse.Namespace, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer) -> dict[str, Any]:
    return {
        "name": args.pretrained_text_encoder_name_or_path,
        "checksum": text_encoder_checksum(text_encoder, tokenizer),
        "max_tokens": max_tokens(text_encoder, tokenizer),
    }


@torch.no_grad()
def states_of(captions: list[str], text: TextEncoder) -> torch.Tensor:
    text_encoder, tokenizer = text
    ids = tokenize(captions, tokenizer, max_tokens(text_encoder, tokenizer))
    return hidden_states(ids.to(text_encoder.device), text_encoder)


if __name__ == "__main__":
    run_script(main)
