"""Damage files of every kind. Reading them must work or end with a `UserError`, and checksums must notice damage."""

import copy
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from attack_commands import COMMANDS
from attack_kills import check_metrics, check_tensors
from attack_sandbox import Case, Command, Failure, check_message, time_limit
from diffusers import DiffusionPipeline

from scalelong_diffusers import UserError, UViTModel, load_adapter, load_pipeline, skip_connections
from scalelong_diffusers.cli.inspect import model_skeleton
from scalelong_diffusers.cli.subject import Inputs, load_subject
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.evaluation import FeatureStatistics, load_features
from scalelong_diffusers.evaluation.images import ImageFiles
from scalelong_diffusers.image_files import read_image
from scalelong_diffusers.models.conversion import CheckpointDetails, convert_from_reference
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampling
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder, tokenize
from scalelong_diffusers.training.checkpoints import CHECKSUMS_FILE, Checkpoints, read_state
from scalelong_diffusers.training.models import load_vae
from scalelong_diffusers.training.monitoring import MetricsFile
from scalelong_diffusers.training.posthoc_ema import reconstruct_ema
from scalelong_diffusers.training.stable_diffusion import load_stable_diffusion


SECONDS = 20


@dataclass
class Damage:
    """A copy of a folder in which one file is damaged."""

    case: Case
    original: Path
    folder: Path
    file: Path
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Target:
    """
    Files of one kind.

    Args:
        source: the folder of the parts that is copied.
        files: patterns of the files that are damaged.
        use: function that reads the copy.
    """

    source: str
    files: tuple[str, ...]
    use: Callable[[Damage], object]


def attack(case: Case):
    """Damage a file and use it."""
    change_file(case, case.random.choice(TARGETS), damaged)


def change_file(case: Case, target: Target, change: Callable[[bytes, random.Random], tuple[bytes, str]]):
    """Change a file of the target and use it. `change` returns the new content and a description of the change."""
    original, folder = case.parts / target.source, case.folder / target.source
    shutil.copytree(original, folder)
    files = {path for pattern in target.files for path in folder.glob(pattern) if path.is_file()}
    file = case.random.choice(sorted(files))
    before = file.read_bytes()
    after, how = change(before, case.random)
    file.write_bytes(after)
    case.note(f"{target.use.__name__}: {file.relative_to(case.folder)}: {how}")
    try:
        with time_limit(SECONDS):
            target.use(Damage(case, original, folder, file, before, after))
    except UserError as error:
        check_message(str(error))


def damaged(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    """Return the content with random damage, and a description of the damage."""
    kind, place, size = generator.randrange(8), generator.randrange(len(content)), generator.choice((1, 8, 64, 512))
    before, after = content[:place], content[place + size :]
    if kind == 0:
        return before, f"cut after {place} bytes"
    if kind == 1:
        return before + bytes(len(content) - len(before) - len(after)) + after, f"{size} zeros at {place}"
    if kind == 2:
        return before + generator.randbytes(size) + content[place:], f"{size} more bytes at {place}"
    changed = bytearray(content)
    bits = sorted({generator.randrange(8 * len(content)) for _ in range(generator.choice((1, 1, 3)))})
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed), f"flipped bits {bits}"


# How the files of each kind are read. Each function raises a `Failure` if damage should have been noticed.


def use_pipeline(damage: Damage):
    pipe = load_pipeline(damage.folder)
    is_diffusers = damage.folder.name == "fine_tuning" or damage.file.parent.name == "scheduler"
    if is_diffusers and damage.file.suffix == ".json":
        return  # diffusers notices some values only when they are used
    pipe.set_progress_bar_config(disable=True)
    condition = {"text_to_image": ["a"], "fine_tuning": ["a"], "class_conditional": [0], "unconditional": 1}
    pipe(condition[damage.folder.name], num_inference_steps=1, output_type="pt")


def use_stable_diffusion(damage: Damage):
    load_stable_diffusion(damage.folder)


def use_model(damage: Damage):
    UViTModel.from_pretrained(damage.folder)


def use_config(damage: Damage):
    str(skip_connections(model_skeleton(str(damage.folder))))


def use_config_in_training(damage: Damage):
    """Start a run with a damaged config."""
    words = COMMANDS["unconditional"].words(
        damage.case.parts,
        damage.case.folder / "out",
        model_config_name_or_path=damage.folder,
        max_train_steps=1,
        sample_steps=0,
    )
    command = Command(COMMANDS["unconditional"].main, words, damage.case.folder / "output")
    if command.finish():
        command.message()


def use_in_diagnosis(damage: Damage):
    """Load the model, the settings and the data of a run, as a diagnosis does."""
    inputs = Inputs(load_subject(str(damage.folder), {}, seed=0), "the run", {}, seed=0)
    for _ in inputs.batches(8, 4, torch.device("cpu")):
        pass


def use_vae(damage: Damage):
    load_vae(str(damage.folder), torch.device("cpu"))


def use_text_encoder(damage: Damage):
    _, tokenizer = load_text_encoder(damage.folder)
    tokenize(["a red circle"], tokenizer, 12)


def use_network(damage: Damage):
    load_features(str(damage.folder))(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def use_adapter(damage: Damage):
    load_adapter(copy.deepcopy(_base_model(damage.case.parts)), damage.folder)


@functools.cache
def _base_model(parts: Path) -> DiffusionPipeline:
    return load_stable_diffusion(parts / "stable_diffusion")


def use_reference_checkpoint(damage: Damage):
    details = CheckpointDetails(num_attention_heads=2, timesteps="discrete", skip_scaling={"method": "none"})
    convert_from_reference(str(damage.folder), str(damage.case.folder / "converted"), details)


def use_statistics(damage: Damage):
    FeatureStatistics.load(damage.file)


def use_checkpoint(damage: Damage):
    """Find the latest checkpoint. Damage must be noticed."""
    found, _ = Checkpoints(damage.folder).find("latest")
    read_state(found)
    if damage.file.is_relative_to(found) and not _is_harmless(damage):
        raise Failure(f"{found.name} passes as undamaged")


def _is_harmless(damage: Damage) -> bool:
    """Return whether nothing changed, or only the white space of the checksums."""
    if damage.file.name != CHECKSUMS_FILE:
        return damage.before == damage.after
    return json.loads(damage.before) == json.loads(damage.after)


def use_run(damage: Damage):
    """Resume a run, which falls back to an earlier checkpoint if the latest one is damaged."""
    if damage.case.random.random() < 0.5:
        shutil.rmtree(damage.folder / "checkpoint-9")
    attacked = COMMANDS["unconditional"]
    words = attacked.words(damage.case.parts, damage.folder, resume_from_checkpoint="latest")
    command = Command(attacked.main, words, damage.case.folder / "output")
    if command.finish():
        command.message()
        return
    check_tensors(damage.folder, damage.original)
    if damage.file.name != "metrics.jsonl":
        check_metrics(damage.folder, damage.original)


def use_metrics(damage: Damage):
    """Resume the log. No undamaged line may be lost."""
    lines = damage.before.splitlines(keepends=True)
    step = damage.case.random.randint(0, len(lines))
    undamaged = set(lines[:step]) & set(damage.after.splitlines(keepends=True))
    MetricsFile(damage.file).resume_at(step)
    kept = damage.file.read_bytes().splitlines(keepends=True)
    if lost := undamaged.difference(kept):
        raise Failure(f"resuming at step {step} lost {sorted(lost)[:1]}")


def use_latents(damage: Damage):
    """Read all rows of precomputed latents. Their values must be right."""
    rows = _latents(damage.folder)
    if damage.file.name == "index.json":  # it has no checksum
        return
    expected = _cached_latents(damage.original)
    if rows.keys() != expected.keys() or any(not torch.equal(rows[name], expected[name]) for name in expected):
        raise Failure("other values than before the damage were read")


def _latents(folder: Path) -> dict[str, torch.Tensor]:
    config = DataConfig(precomputed_dir=str(folder), resolution=16, center_crop=True, random_flip=True)
    data = load_training_data(config, channels=3, needs_labels=True, needs_captions=True, seed=0)
    [batch] = data.train.batches(batch_size=data.train.num_samples, num_steps=1)
    return {name: column for name, column in batch.columns.items() if isinstance(column, torch.Tensor)}


_cached_latents = functools.cache(_latents)


def use_ema_snapshots(damage: Damage):
    """Reconstruct EMA weights from the snapshots. Damage must be noticed."""
    average = _average(damage.folder)
    expected = _cached_average(damage.original)
    if any(not torch.equal(average[name], expected[name]) for name in expected):
        raise Failure("damaged snapshots give other weights")


def _average(folder: Path) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as output_dir:
        [result] = reconstruct_ema(str(folder), output_dir, [0.08])
        return load_pipeline(result.folder).unet.state_dict()


_cached_average = functools.cache(_average)


def use_image(damage: Damage):
    read_image(damage.file, damage.file.name)


def use_evaluated_images(damage: Damage):
    for _ in ImageFiles.of_folder(damage.folder, None).batches(4):
        pass


def use_dataset(damage: Damage):
    """Read all rows of a dataset, in one of both ways."""
    streaming = damage.folder.name == "tar" or (damage.folder.name == "parquet" and damage.case.random.random() < 0.5)
    on_bad_image = damage.case.random.choice(("skip", "error"))
    damage.case.note(f"{streaming=} {on_bad_image=}")
    data = load_training_data(
        DataConfig(
            train_data_dir=str(damage.folder),
            resolution=8,
            cache_dir=str(damage.case.folder / "cache"),
            streaming=streaming,
            on_bad_image=on_bad_image,
        ),
        channels=3,
        needs_labels=damage.folder.name != "captioned",
        needs_captions=damage.folder.name != "images",
        seed=0,
    )
    for _ in data.train.batches(batch_size=2, num_steps=6):
        pass


def use_samples(damage: Damage):
    """Make the missing images of a folder of samples."""
    settings = json.loads((damage.original / "sample.json").read_text())
    names = ("num_inference_steps", "guidance_scale", "seed")
    config = SampleConfig(settings["model"], **{name: settings[name] for name in names})
    Sampling(copy.deepcopy(_class_conditional(damage.case.parts)), config, damage.folder, 10, batch_size=5).make()


@functools.cache
def _class_conditional(parts: Path) -> DiffusionPipeline:
    return load_pipeline(parts / "class_conditional")


TARGETS = (
    *(Target(f"pipelines/{name}", ("**/*",), use_pipeline)
      for name in ("unconditional", "class_conditional", "text_to_image", "fine_tuning")),
    Target("stable_diffusion", ("**/*",), use_stable_diffusion),
    Target("sharded", ("*",), use_model),
    Target("model", ("config.json",), use_config),
    Target("pipelines/fine_tuning", ("model_index.json", "unet/config.json"), use_config),
    Target("model", ("config.json",), use_config_in_training),
    Target("vae", ("*",), use_vae),
    Target("clip", ("*",), use_text_encoder),
    Target("network", ("*",), use_network),
    Target("lora", ("*.safetensors", "*.json"), use_adapter),
    Target("reference_checkpoint", ("*",), use_reference_checkpoint),
    Target("statistics", ("*",), use_statistics),
    Target("unconditional", ("checkpoint-*/**/*",), use_checkpoint),
    Target("unconditional", ("*", "checkpoint-*/**/*", "unet/*", "scheduler/*"), use_run),
    Target("unconditional", ("settings.json", "model_index.json", "unet/*", "scheduler/*"), use_in_diagnosis),
    Target("unconditional", ("ema_snapshots/*",), use_ema_snapshots),
    Target("unconditional", ("metrics.jsonl",), use_metrics),
    Target("precompute", ("*",), use_latents),
    Target("images", ("**/*",), use_image),
    *(Target(name, ("**/*",), use_dataset) for name in ("images", "captioned", "parquet", "tar", "saved")),
    Target("sample", ("*",), use_samples),
    Target("sample", ("*.png",), use_evaluated_images),
)  # fmt: skip
