"""`scalelong probe` measures what the blocks of a model know about the classes of images."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from scalelong_diffusers.cli.diagnose import MeasuringConfig, add_measuring_options, report
from scalelong_diffusers.diagnosis.probe import BAR, MAX_PIXELS, TIMES, ProbeResult, probe
from scalelong_diffusers.diagnosis.probe_page import build_probe_page
from scalelong_diffusers.diagnosis.report import aligned
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.memory import check_memory
from scalelong_diffusers.models.mixin import skip_layout
from scalelong_diffusers.options import build_config, option
from scalelong_diffusers.pipelines.sampling import choose_device


RESULT_FILE = "probe.json"


@dataclass(frozen=True)
class ProbeConfig(MeasuringConfig):
    """The noise and the number of images of linear probes."""

    timesteps: tuple[int, ...] = option(
        (11, 51, 101),
        "timesteps of the noise, in thousandths of the training schedule",
        at_least=0,
        at_most=TIMES - 1,
        metavar="T",
    )
    grid: int = option(
        2,
        "average the features over N x N cells of the image (1: over all positions)",
        at_least=1,
        at_most=MAX_PIXELS,
        metavar="N",
    )
    num_images: int = option(
        10_000, "train the probes on at most N images", at_least=20, at_most=10_000_000, metavar="N"
    )
    num_test_images: int = option(
        5_000,
        "test the probes on at most N images of the dataset's test split; without one, up to a tenth of the images "
        "are held out",
        at_least=1,
        at_most=1_000_000,
        metavar="N",
    )
    batch_size: int = option(64, "images per batch", at_least=1, at_most=100_000, metavar="N")

    def __post_init__(self):
        super().__post_init__()
        if len(set(self.timesteps)) < len(self.timesteps):
            raise UserError(f"timesteps must differ from each other, got {' '.join(map(str, self.timesteps))}")


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "probe",
        help="measure what each block of a model knows about the classes of images",
        description=(
            "Add a little noise to labeled images, run the model, and train a linear classifier on the features of "
            "each block. Models of classes or text get the null class or the empty text."
        ),
    )
    add_measuring_options(parser, ProbeConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    config = build_config(ProbeConfig, given)
    report(config, arguments.json, lambda: measure(config, given), RESULT_FILE, build_probe_page, _lines)
    return 0


def _lines(result: ProbeResult) -> list[str]:
    return [result.model, result.size, *aligned(result.rows()), result.summary]


def measure(config: ProbeConfig, given: Mapping[str, Any]) -> tuple[ProbeResult, str]:
    """Return the result, and a description of the data. `given` are the flags."""
    from scalelong_diffusers.cli.subject import ProbeInputs, load_subject  # imports the training code, which is slow

    subject = load_subject(config.model, given, config.seed)
    inputs = ProbeInputs(subject, config.model, given, config.seed, config.num_test_images)
    train, test = inputs.data.train, inputs.data.validation
    count = min(config.num_images, train.num_samples) + test.num_samples
    skips = skip_layout(subject.model).find(subject.model)
    width = sum(skip.width + skip.hidden_width for skip in skips)
    check_memory(
        f"the features of {count:,} images with --grid {config.grid}",
        4 * count * width * config.grid**2 * len(config.timesteps),
    )
    device = choose_device(config.device)
    subject.to(device)
    with tqdm(total=count * len(config.timesteps), desc="features", bar_format=BAR) as bar:
        result = probe(
            subject.model,
            inputs.train(config.num_images, config.batch_size, device),
            inputs.test(config.batch_size, device),
            subject.noising,
            config.timesteps,
            config.grid,
            bar.update,
            show_progress=True,
        )
    return result, inputs.description
