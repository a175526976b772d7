r"""
Encode a dataset once, so that training does not repeat it in each epoch.

    accelerate launch train/precompute_latents.py --train_data_dir flowers --resolution 256 --center_crop \
        --random_flip --with_labels --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema --output_dir latents
    accelerate launch train/train_class_conditional.py --precomputed_dir latents --resolution 256 --center_crop \
        --random_flip --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema --output_dir out

The script stores the means and log variances of the latents, from which training draws new latents in each epoch. To
resume after an interruption, run the same command again.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from scalelong_diffusers import options
from scalelong_diffusers.data import load_training_data
from scalelong_diffusers.data.folders import check_outside
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import option
from scalelong_diffusers.processes import processes
from scalelong_diffusers.terminal import print_lines
from scalelong_diffusers.training.precomputing import DTYPES, Encoders, PrecomputeDataConfig, PrecomputedWriter
from scalelong_diffusers.training.script import TrainingStopped, run_script


@dataclass(frozen=True)
class PrecomputeConfig:
    """Settings for precomputing latents. Training chooses the held-out images later."""

    vae: str = option(
        dataclasses.MISSING,
        "folder or Hub id of the autoencoder",
        flag="pretrained_vae_model_name_or_path",
        metavar="PATH",
    )
    output_dir: str = option(
        dataclasses.MISSING, "folder for the latents; pass it to the training scripts as --precomputed_dir"
    )
    text_encoder: str | None = option(
        None,
        "folder or Hub id of a CLIP text encoder, to encode all captions",
        flag="pretrained_text_encoder_name_or_path",
        metavar="PATH",
    )
    with_labels: bool = option(False, "store the classes")
    batch_size: int = option(16, "images per process and encoder call", at_least=1, at_most=1_000_000)
    rows_per_shard: int = option(1024, "images per file", at_least=1, at_most=1_000_000)
    dtype: str = option("fp32", "dtype of the stored latents; fp16 halves the size but rounds", choices=DTYPES)
    data: PrecomputeDataConfig = field(default_factory=PrecomputeDataConfig)

    def __post_init__(self):
        options.check_options(self)
        if not self.data.center_crop:
            raise UserError("center_crop must be on: latents are computed from a single crop of each image")


def main(argv: Sequence[str] | None = None):
    parser = options.ArgumentParser(usage="%(prog)s [options]", description=__doc__.strip())
    options.add_options(parser, PrecomputeConfig)
    held_out_in_training = ("precomputed_dir", "max_train_samples", "validation_size")
    options.add_options(parser, PrecomputeDataConfig, "data", without=held_out_in_training)
    config = options.parse_options(parser, PrecomputeConfig, argv)
    try:
        precompute(config)
    except KeyboardInterrupt as error:
        message = "interrupted; run the same command again to resume"
        raise TrainingStopped(message, exit_code=130, on_all_processes=True) from error
    processes().destroy_process_group()


def precompute(config: PrecomputeConfig):
    """Encode the dataset of a config. Call this function from Python."""
    check_outside(config.output_dir, config.data.train_data_dir)
    encoders = Encoders(config.vae, config.text_encoder, config.dtype)
    data = load_training_data(
        config.data,
        channels=encoders.vae.config.in_channels,
        needs_labels=config.with_labels,
        needs_captions=config.text_encoder is not None,
        seed=0,
    )
    writer = PrecomputedWriter(config.output_dir, config.data, data, encoders, config.rows_per_shard)
    size = writer.write(config.batch_size)
    if processes().is_local_main_process:
        print_lines(f"{data.description}: {size / 2**20:,.1f} MiB of latents in {config.output_dir}")


if __name__ == "__main__":
    run_script(main)
