"""Sample a run that has not finished: a checkpoint, and the parts of its pipeline that are not trained."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffusers import DiffusionPipeline, ModelMixin
from transformers import CLIPTextModel, PreTrainedModel

from scalelong_diffusers.download import load_model
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, read_json_file
from scalelong_diffusers.models.mixin import scaled_class_of
from scalelong_diffusers.pipelines.loading import INDEX, load_pipeline
from scalelong_diffusers.training.checkpoints import CHECKSUMS_FILE, LATEST, Checkpoints, damage, replace_folder


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun

PARTS_FOLDER = "unfinished"


def save_parts(run: "TrainingRun", pipe: DiffusionPipeline):
    """Save the parts of a run's pipeline that its checkpoints do not hold."""
    partial = run.folder / f"{PARTIAL}{PARTS_FOLDER}"
    pipe.save_config(partial)
    for name, component in pipe.components.items():
        if component is not None and name not in run.modules:
            component.save_pretrained(partial / name)
    replace_folder(partial, run.folder / PARTS_FOLDER)


def find_checkpoint(source: str) -> Path | None:
    """
    Return the checkpoint to load for `source`, or None if `source` is neither a run nor a checkpoint.

    It is `source` itself, or the latest complete checkpoint of an unfinished run.
    """
    folder = Path(source)
    if (folder / CHECKSUMS_FILE).is_file():
        if broken := damage(folder):
            raise UserError(f"cannot load {folder}: {broken}")
        return folder
    if not folder.is_dir() or (folder / INDEX).is_file() or not Checkpoints(folder).steps():
        return None
    return Checkpoints(folder).find(LATEST)[0]


def load_checkpoint(checkpoint: Path, **options) -> DiffusionPipeline:
    """Load the pipeline of a checkpoint, with EMA weights if there are any. Takes the options of `load_pipeline`."""
    parts = checkpoint.resolve().parent / PARTS_FOLDER
    if not (parts / INDEX).is_file():
        raise UserError(
            f"{checkpoint} cannot be loaded, because {parts} is missing, in which a run from scratch keeps the other "
            "parts of its pipeline: run the same training command with --resume_from_checkpoint latest"
        )
    trained = {path.parent.name for path in checkpoint.glob("*/config.json")}
    if not trained:
        raise UserError(
            f"{checkpoint} cannot be loaded, because FSDP2 wrote it in shards: run the same training command with "
            "--resume_from_checkpoint latest"
        )
    modules = {
        name: _load(checkpoint / (f"{name}_ema" if f"{name}_ema" in trained else name), **options)
        for name in trained
        if not name.endswith("_ema")
    }
    return load_pipeline(parts, **modules, **options)


def _load(folder: Path, **options) -> ModelMixin | PreTrainedModel:
    config = read_json_file(folder / "config.json")
    model_class = scaled_class_of(config, str(folder)) if "_class_name" in config else CLIPTextModel
    return load_model(model_class, folder, str(folder), **options)
