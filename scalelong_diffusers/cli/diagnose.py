"""`scalelong diagnose` measures whether the long skips of a model are a problem."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.diagnosis.diagnose import diagnose
from scalelong_diffusers.diagnosis.figures import Diagnosis
from scalelong_diffusers.diagnosis.page import build_page
from scalelong_diffusers.diagnosis.report import report_lines
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import atomic_write, remove_leftovers, write_json
from scalelong_diffusers.locks import locked
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.noise import NoiseConfig
from scalelong_diffusers.options import add_options, build_config, check_options, option, options_of
from scalelong_diffusers.patching import apply_skip_scaling
from scalelong_diffusers.pipelines.sampling import choose_device
from scalelong_diffusers.processes import run_on_main_process
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.terminal import print_lines


RESULT_FILE, PAGE_FILE = "diagnosis.json", "index.html"
# The options of `DataConfig` that the data can have.
DATA_OPTIONS = (
    *("dataset_name", "dataset_config_name", "dataset_revision", "train_data_dir", "cache_dir", "image_column"),
    *("label_column", "caption_column", "resolution", "crop_size", "image_interpolation_mode", "on_bad_image"),
    "num_shapes",
)
# Models with more weights run fewer images by default, one at a time.
_LARGE, _FEW_IMAGES, _MANY_IMAGES, _BATCH_SIZE = 400_000_000, 8, 64, 8


@dataclass(frozen=True)
class MeasuringConfig:
    """The model to measure, and where to write the result."""

    model: str
    seed: int = option(
        0, "seed of the noise, and of the weights of an untrained model", at_least=0, at_most=2**63 - 1, metavar="N"
    )
    device: str | None = option(None, "device, such as cuda:1 (default: a GPU if one is available)")
    output_dir: str | None = option(
        None, f"folder for {PAGE_FILE}, a page with charts, and the figures as JSON", metavar="DIR"
    )

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True)
class DiagnoseConfig(MeasuringConfig):
    """How many images to use for a diagnosis."""

    num_images: int | None = option(
        None, f"number of images (default: {_MANY_IMAGES}, or {_FEW_IMAGES} for models with more than 400 million "
        "weights)", at_least=_FEW_IMAGES, at_most=100_000, metavar="N",
    )  # fmt: skip
    batch_size: int | None = option(
        None, "images per batch, which changes memory and time but no figure (default: 8, or 1 for large models)",
        at_least=1, at_most=100_000, metavar="N",
    )  # fmt: skip


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "diagnose",
        help="measure whether the long skips of a model are a problem",
        description=(
            "Measure features and gradients of the long skips of a model, its sensitivity to noise and its numerical "
            "headroom, and say whether scaling the skips is likely to help. Without a dataset, the built-in shapes "
            "are used. Conditions that a model needs and the data does not have are drawn at random."
        ),
    )
    add_measuring_options(parser, DiagnoseConfig)
    add_options(parser, SkipScalingConfig, "skip scaling, instead of the model's own", optional=True)
    parser.set_defaults(run=run)


def add_measuring_options(parser: argparse.ArgumentParser, config_class: type[MeasuringConfig]):
    """Add the arguments of a command that measures a model on images."""
    parser.add_argument(
        "model",
        help="a model or pipeline (a local folder or an id on the Hub), a config.json, a training run or one of its "
        "checkpoints, or a preset",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(parser, config_class)
    add_options(parser, NoiseConfig, "noise", "default: as in the pipeline's scheduler or the training run")
    data = parser.add_argument_group("data", "default: the data of the training run, or the built-in shapes")
    add_options(data, DataConfig, without={flag for flag, _, _ in options_of(DataConfig)}.difference(DATA_OPTIONS))


def run(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    config = build_config(DiagnoseConfig, given)
    report(config, arguments.json, lambda: measure(config, given), RESULT_FILE, build_page, report_lines)
    return 0


def measure(config: DiagnoseConfig, given: Mapping[str, Any]) -> tuple[Diagnosis, str]:
    """Return the diagnosis, and a description of the data. `given` are the flags."""
    from scalelong_diffusers.cli.subject import Inputs, load_subject  # imports the training code, which is slow

    scaling = SkipScalingConfig.from_flags(given)
    device = choose_device(config.device)
    subject = load_subject(config.model, given, config.seed)
    if scaling is not None or not isinstance(subject.model, SkipScalingMixin):
        apply_skip_scaling(subject.model, scaling or "none")  # a stock model becomes its scaled class
    subject.to(device)
    inputs = Inputs(subject, config.model, given, config.seed)
    is_large = subject.model.num_parameters() > _LARGE
    count = config.num_images or (_FEW_IMAGES if is_large else _MANY_IMAGES)
    batches = list(inputs.batches(count, config.batch_size or (1 if is_large else _BATCH_SIZE), device))
    return diagnose(subject.model, batches, subject.noising, subject.is_trained), inputs.description


def report(
    config: MeasuringConfig,
    as_json: bool,
    measure: Callable[[], tuple[Any, str]],
    file: str,
    build_page: Callable[[Any, str, str], str],
    lines: Callable[[Any], list[str]],
):
    """
    Measure, write the results into the output folder, if there is one, and print them.

    Args:
        measure: returns the result, which has a `to_dict`, and a description of the data.
        file: name of the JSON file.
        build_page, lines: make the page and the printed lines of a result.
    """
    with results_folder(config.output_dir) as folder:
        result, data = measure()
        content = {"source": config.model, "data_source": data, **result.to_dict()}
        if folder is not None:
            page = build_page(result, config.model, data)
            run_on_main_process(lambda: write_results(folder, file, content, page))
    if as_json:
        print_lines(json.dumps(content))
    else:
        print_lines(f"{config.model}; {data}", *lines(result))


@contextmanager
def results_folder(output_dir: str | None) -> Iterator[Path | None]:
    """Lock the output folder before the measurement, so that a folder in use fails fast."""
    if output_dir is None:
        yield None
        return
    if os.path.isfile(output_dir):
        raise UserError(f"--output_dir must be a folder, got the file {output_dir}")
    with locked(Path(output_dir)):
        yield Path(output_dir)


def write_results(folder: Path, file: str, content: Mapping[str, Any], page: str):
    """Write the figures and the page."""
    remove_leftovers(folder)
    write_json(folder / file, content)
    atomic_write(folder / PAGE_FILE, lambda partial: partial.write_text(page, encoding="utf-8"))
