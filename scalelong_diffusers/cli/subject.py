"""The model, noise process and data that `scalelong diagnose` and `scalelong probe` measure."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin, StableDiffusionXLPipeline

from scalelong_diffusers.cli.diagnose import DATA_OPTIONS
from scalelong_diffusers.cli.inspect import model_skeleton
from scalelong_diffusers.data import Batch, DataConfig, TrainingData, load_training_data
from scalelong_diffusers.diagnosis.measure import Samples, spread_positions
from scalelong_diffusers.diagnosis.probe import LabeledImages
from scalelong_diffusers.download import build_skeleton, load_model, read_json
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.files import read_json_file
from scalelong_diffusers.memory import check_memory
from scalelong_diffusers.models.mixin import scaled_class_of
from scalelong_diffusers.noise import (
    NoiseConfig,
    NoiseProcess,
    noise_process,
    trained_process,
    without_unread_options,
)
from scalelong_diffusers.options import build_config, options_of
from scalelong_diffusers.pipelines.compatibility import (
    Autoencoder,
    Denoiser,
    check_size,
    required_conditions,
    size_multiple,
    square_size,
    vae_factor,
)
from scalelong_diffusers.pipelines.loading import INDEX, load_pipeline, pipeline_index
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder, text_embedding_width
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.presets import PRESETS, get_preset
from scalelong_diffusers.randomness import normal, seed_for, uniform
from scalelong_diffusers.training.latents import encode_images
from scalelong_diffusers.training.settings import SETTINGS_FILE
from scalelong_diffusers.training.stable_diffusion import (
    NUM_TIME_IDS,
    added_conditions,
    encode_tokens,
    load_stable_diffusion,
    tokenize_prompts,
)
from scalelong_diffusers.training.unfinished import PARTS_FOLDER, find_checkpoint, load_checkpoint


_SOURCES = {"dataset_name", "train_data_dir"}
# Of Stable Diffusion, for a U-Net without its pipeline.
_TEXT_TOKENS, _VAE_FACTOR = 77, 8


@dataclass
class Subject:
    """A model with its noise process, the settings of its training run, and the pipeline that it belongs to."""

    model: ModelMixin
    noising: NoiseProcess
    settings: Mapping[str, Any]
    is_trained: bool = True
    pipe: DiffusionPipeline | None = None

    @property
    def vae(self) -> Autoencoder | None:
        return None if self.pipe is None else self.pipe.vae

    @property
    def latent_scale(self) -> float | None:
        return None if self.pipe is None else self.pipe.config.get("latent_scale")

    def to(self, device: torch.device):
        (self.model if self.pipe is None else self.pipe).to(device)


def load_subject(source: str, given: Mapping[str, Any], seed: int) -> Subject:
    """
    Load a model, untrained if there are no weights, or the parts of a pipeline.

    `given` are the flags. They override the settings of a training run.
    """
    _check_name(source)
    settings: Mapping[str, Any] = {}
    if source in PRESETS and not os.path.exists(source):
        preset = get_preset(source)
        model, settings = _untrained(preset.model_class, preset.config, source, seed), preset.training
        is_trained = False
    elif source.endswith(".json") and os.path.isfile(source):
        model, is_trained = _untrained_from(read_json_file(Path(source)), source, seed), False
    else:
        settings = _run_settings(source)
        checkpoint = find_checkpoint(source)
        if checkpoint is not None and (checkpoint.parent / PARTS_FOLDER).is_dir():
            return _from_pipeline(load_checkpoint(checkpoint), settings, given)
        # Checkpoints of fine-tuning hold a U-Net only.
        folder = source if checkpoint is None else str(checkpoint / "unet")
        if os.path.isfile(folder) or read_json(folder, INDEX) is not None:
            return _from_pipeline(_load_pipeline(folder), settings, given)
        model, is_trained = _load_model(folder, seed)
    return Subject(model, _noise_process(settings, given), settings, is_trained)


def _check_name(source: str):
    """Reject misspelled presets."""
    could_be_known = source in PRESETS or "/" in source or os.path.exists(source)  # ids on the Hub have a slash
    if not could_be_known and (advice := did_you_mean(source, PRESETS)):
        raise UserError(f"{source} is neither a local folder nor a preset{advice}")


def _load_pipeline(folder: str) -> DiffusionPipeline:
    """Load a pipeline as one of ours. They have one text encoder, so SDXL is loaded as for fine-tuning."""
    is_xl = pipeline_index(folder, {})["_class_name"] == StableDiffusionXLPipeline.__name__
    return load_stable_diffusion(folder) if is_xl else load_pipeline(folder)


def _from_pipeline(pipe: DiffusionPipeline, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Subject:
    flags = {flag for flag, _, _ in options_of(NoiseConfig)}
    is_set = flags & {**settings, **given}.keys()
    noising = _noise_process(settings, given) if is_set else trained_process(pipe)
    return Subject(pipe.unet, noising, settings, pipe=pipe)


def _noise_process(settings: Mapping[str, Any], given: Mapping[str, Any]) -> NoiseProcess:
    fitting = without_unread_options(settings, given.get("prediction_type"))
    return noise_process(build_config(NoiseConfig, {**fitting, **given}))


def _run_settings(source: str) -> dict[str, Any]:
    """Return the settings of the training run in a folder, or of the run that a checkpoint belongs to."""
    folder = Path(source)
    files = [place / SETTINGS_FILE for place in (folder, folder.parent) if folder.is_dir()]
    file = next((file for file in files if file.is_file()), None)
    accepted = {*DATA_OPTIONS, *(flag for flag, _, _ in options_of(NoiseConfig))}
    stored = {} if file is None else read_json_file(file)
    return {name: value for name, value in stored.items() if name in accepted and value is not None}


def _load_model(source: str, seed: int) -> tuple[ModelMixin, bool]:
    """Load a model, or build it if its folder has a config but no weights. Return whether it has weights, too."""
    skeleton = model_skeleton(source)  # says what is wrong with a folder without a model
    weights = [file for end in ("safetensors", "bin") for file in Path(source).glob(f"*.{end}*")]
    if os.path.isdir(source) and not weights:
        return _untrained_from(read_json_file(Path(source, "config.json")), source, seed), False
    return load_model(type(skeleton), source, source), True


def _untrained_from(config: Mapping[str, Any], source: str, seed: int) -> ModelMixin:
    return _untrained(scaled_class_of(config, source), config, source, seed)


def _untrained(model_class: type[ModelMixin], config: Mapping[str, Any], source: str, seed: int) -> ModelMixin:
    skeleton = build_skeleton(model_class, config, source)
    check_memory(f"the weights of {source}", sum(weight.nbytes for weight in skeleton.parameters()))
    torch.manual_seed(seed_for(seed, "model"))
    return model_class.from_config(config)


class ModelData:
    """
    The dataset of a measurement, as the model takes it: images, or latents if there is an autoencoder.

    Args:
        name: the model in error messages.
        values: data options by flag. The settings of the training run are the defaults.
        command: the command in error messages.
    """

    def __init__(self, subject: Subject, name: str, values: Mapping[str, Any], seed: int, command: str):
        self.subject, self.name, self.seed = subject, name, seed
        self.model = subject.model
        _check_inputs(self.model, name, command)
        self.channels = (self.model if subject.vae is None else subject.vae).config.in_channels
        self.takes_images = self.channels in (1, 3)
        # Another dataset replaces the data of a training run, and so does noise for a model of latents.
        if self.takes_images and not values.keys() & _SOURCES:
            values = {**subject.settings, **values}
        values = {flag: value for flag, value in values.items() if flag in DATA_OPTIONS}
        self.has_dataset = bool(values.keys() & _SOURCES)
        factor = vae_factor(subject.vae)
        if "resolution" not in values:
            values["resolution"] = _own_size(self.model, name, command) * factor
        self.config = DataConfig(**values)
        check_size("resolution", self.config.resolution, size_multiple(self.model) * factor)
        self.size = self.config.resolution // factor
        self.encode_captions = None if subject.pipe is None else caption_encoder(subject.pipe, self.config.resolution)
        if self.has_dataset and not self.takes_images:
            raise UserError(f"{name} takes {self.channels} channels, not images: pass a pipeline with an autoencoder")

    def open(self, needs_labels: bool, needs_captions: bool = False) -> TrainingData:
        """Open the dataset."""
        # The built-in shapes have colors. They are averaged for a gray model.
        return load_training_data(
            self.config, channels=self.channels if self.has_dataset else 3, seed=self.seed, needs_labels=needs_labels,
            needs_captions=needs_captions,
        )  # fmt: skip

    def clean(self, batch: Batch) -> torch.Tensor:
        """Return the images or latents of a batch."""
        clean = encode_images(batch, self.subject.vae, self.subject.latent_scale)
        return clean.mean(1, keepdim=True) if self.channels == 1 else clean

    def text_shape(self) -> tuple[int, int]:
        """Return the number and width of the hidden states of a text encoder that the model takes."""
        return self.model.config.get("context_length", _TEXT_TOKENS), text_embedding_width(self.model)

    def added_conditions(self, pooled_text: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the added conditions of a U-Net like SDXL's."""
        return added_conditions(pooled_text, self.size * _VAE_FACTOR)


class Inputs(ModelData):
    """
    The inputs of a model for a diagnosis: images or latents of a dataset, or noise for a model of latents without an
    autoencoder.
    """

    def __init__(self, subject: Subject, name: str, values: Mapping[str, Any], seed: int):
        super().__init__(subject, name, values, seed, "`scalelong diagnose`")
        if not self.takes_images:
            self.description = f"normal noise instead of latents with {self.channels} channels"
            self.stream = None
            return
        needs_labels = self.has_dataset and "class_labels" in required_conditions(self.model)
        data = self.open(needs_labels, needs_captions=self.encode_captions is not None)
        classes = self.model.config.get("num_class_embeds")
        if data.num_classes is not None and data.num_classes > classes:
            raise UserError(f"the data has {data.num_classes} classes, and {name} takes {classes}")
        self.stream, self.description = data.train, data.description

    def batches(self, count: int, batch_size: int, device: torch.device) -> Iterator[Samples]:
        """Yield `count` samples."""
        size = min(batch_size, count)
        steps = math.ceil(count / size)
        if self.stream is None:
            loaded = (Batch({}, range(k * size, (k + 1) * size), "diagnosis", self.seed) for k in range(steps))
        else:
            loaded = self.stream.batches(size, num_steps=steps)
        for k, batch in enumerate(loaded):
            yield self._samples(batch.to(device), k * size).first(min(size, count - k * size))

    def _samples(self, batch: Batch, first: int) -> Samples:
        if self.stream is None:
            clean = normal(batch.keys, "clean", (self.model.config.in_channels, self.size, self.size))
        else:
            clean = self.clean(batch)
        positions = spread_positions(first, len(batch)).to(clean.device)
        noise, perturbation = (batch.normal_like(clean, purpose) for purpose in ("noise", "perturbation"))
        return Samples(clean, noise, positions, perturbation, self._conditions(batch))

    @torch.no_grad()
    def _conditions(self, batch: Batch) -> dict[str, Any]:
        """Return labels and text. They are random if the data has none."""
        conditions = {name: self._random(name, batch.keys) for name in required_conditions(self.model)}
        if "labels" in batch and "class_labels" in conditions:
            conditions["class_labels"] = batch["labels"]
        if self.encode_captions is not None:
            conditions |= self.encode_captions(batch["captions"])
        return conditions

    def _random(self, condition: str, keys: torch.Tensor) -> Any:
        """Return random values of a condition of the model."""
        if condition == "class_labels":
            return (uniform(keys, "label") * self.model.config.num_class_embeds).long()
        if condition == "encoder_hidden_states":
            return normal(keys, "text", self.text_shape())
        return self.added_conditions(normal(keys, "pooled text", (_pooled_width(self.model),)))


class ProbeInputs(ModelData):
    """The inputs of a model for linear probes: labeled images or latents of a dataset, without a condition."""

    def __init__(self, subject: Subject, name: str, values: Mapping[str, Any], seed: int, num_test_images: int):
        super().__init__(subject, name, values, seed, "`scalelong probe`")
        if not self.takes_images:
            raise UserError(f"{name} takes {self.channels} channels, not images: pass a pipeline with an autoencoder")
        self.config = dataclasses.replace(self.config, validation_size=num_test_images)
        self.data = self.open(needs_labels=True)
        self.description = self.data.description

    def train(self, count: int, batch_size: int, device: torch.device) -> Iterator[LabeledImages]:
        """Yield at most `count` training images, each of them once."""
        count = min(count, self.data.train.num_samples)
        steps = math.ceil(count / batch_size)
        for k, batch in enumerate(self.data.train.batches(batch_size, num_steps=steps)):
            yield self._labeled(batch.to(device)).first(count - k * batch_size)

    def test(self, batch_size: int, device: torch.device) -> Iterator[LabeledImages]:
        """Yield the held-out images."""
        for batch in self.data.validation.batches(batch_size):
            yield self._labeled(batch.to(device))

    def _labeled(self, batch: Batch) -> LabeledImages:
        clean = self.clean(batch)
        return LabeledImages(clean, batch.normal_like(clean, "noise"), batch["labels"], self._null_conditions(clean))

    @torch.no_grad()
    def _null_conditions(self, clean: torch.Tensor) -> dict[str, Any]:
        """
        Return the inputs of a model for no class and no text.

        The null class is the last one. A model without a null class gets its last class for all images.
        """
        conditions = {name: self._null(name, clean) for name in required_conditions(self.model)}
        if self.encode_captions is not None:
            conditions |= self.encode_captions([""] * len(clean))
        return conditions

    def _null(self, condition: str, clean: torch.Tensor) -> Any:
        count = len(clean)
        if condition == "class_labels":
            return torch.full((count,), self.model.config.num_class_embeds - 1, device=clean.device)
        if condition == "encoder_hidden_states":
            return clean.new_zeros(count, *self.text_shape())
        return self.added_conditions(clean.new_zeros(count, _pooled_width(self.model)))


def _check_inputs(model: ModelMixin, name: str, command: str):
    """Check that the inputs of a model can be made."""
    if not isinstance(model, Denoiser):
        raise UserError(
            f"{name} is a {type(model).__name__}, and {command} makes the inputs of UViTModel, UNet2DModel "
            "and UNet2DConditionModel only: measure it with SkipStatistics in Python (docs/diagnose.md)"
        )
    for condition, option in required_conditions(model).items():
        is_known = condition in ("class_labels", "encoder_hidden_states")
        if not is_known and not (condition == "added_cond_kwargs" and _pooled_width(model) > 0):
            raise UserError(f"{name} takes {condition} ({option}), which {command} cannot make")


def _pooled_width(model: ModelMixin) -> int:
    """Return the width of the pooled text that a U-Net like SDXL's takes, or 0 for other U-Nets."""
    config = model.config
    if config.addition_embed_type != "text_time":
        return 0
    return config.projection_class_embeddings_input_dim - NUM_TIME_IDS * config.addition_time_embed_dim


def caption_encoder(
    pipe: DiffusionPipeline, resolution: int
) -> Callable[[Sequence[str]], dict[str, torch.Tensor]] | None:
    """Return the function from captions to inputs of the pipeline's model, or None if the pipeline has no text."""
    if isinstance(pipe, StableDiffusionXLPipeline):
        tokenizers = tokenize_prompts(pipe)

        def encode(captions: Sequence[str]) -> dict[str, Any]:
            ids = {name: tokenize(captions).to(pipe.device) for name, tokenize in tokenizers.items()}
            return encode_tokens(pipe, ids, resolution=resolution)

        return encode
    if isinstance(pipe, ScaleLongTextToImagePipeline) and pipe.text_encoder is not None:
        encoder = CaptionEncoder(pipe.text_encoder, pipe.tokenizer, pipe.unet)
        return lambda captions: {"encoder_hidden_states": encoder(captions)}
    return None


def _own_size(model: ModelMixin, name: str, command: str) -> int:
    size = square_size(model)
    if size is None:
        found = model.config.sample_size
        raise UserError(f"{name} has sample_size={found}, and {command} takes square images: pass --resolution")
    return size
