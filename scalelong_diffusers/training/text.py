"""Text conditioning: the text encoder, loaded or built from the captions, and the prompts of sample grids."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.data import Batch, TrainingData
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.text_encoding import (
    CaptionEncoder,
    load_text_encoder,
    text_embedding_width,
    token_ids,
    tokenize,
)
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.training.latents import check_text_encoder
from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun

TextEncoder = tuple[CLIPTextModel, CLIPTokenizer]

# Width and length of the small CLIP, unless the model requires others.
_SMALL_WIDTH, _SMALL_LENGTH = 128, 32
_HEAD_WIDTH = 32
# The length of the published CLIP, if the model sets no limit.
_MAX_LENGTH = 77


def load_text_encoder_for_training(source: str, device: torch.device, trained: bool = False) -> TextEncoder:
    """Load a CLIP, frozen unless it is trained."""
    text_encoder, tokenizer = load_text_encoder(source)
    return text_encoder.requires_grad_(trained).to(device), tokenizer


def build_text_encoder(data: TrainingData, model: ModelMixin, seed: int) -> TextEncoder:
    """
    Build a small CLIP that fits the model, with a tokenizer for the training captions.

    The CLIP reads as many tokens as the longest caption has, training or held-out, since padding takes time and
    dilutes the text.
    """
    captions = list(data.train.captions())
    width, limit = text_embedding_width(model), model.config.get("context_length", _MAX_LENGTH)
    tokenizer = build_tokenizer(captions, limit)
    longest = max(map(len, token_ids(dict.fromkeys([*captions, *data.validation.captions()]), tokenizer)))
    tokenizer.model_max_length = min(longest, limit)
    torch.manual_seed(seed_for(seed, "text_encoder"))
    num_heads = width // _HEAD_WIDTH if width % _HEAD_WIDTH == 0 else 1
    return build_text_model(tokenizer, width, num_attention_heads=num_heads), tokenizer


class TextCondition:
    """
    The text side of a text-to-image run: the encoder, the token ids in each batch, and dropped captions.

    The config names the encoder. Without a name, a small CLIP is built from the captions and trained.
    """

    def __init__(self, run: "TrainingRun"):
        self.run = run
        config = run.config
        source = config.pretrained_text_encoder_name_or_path
        self.is_trained = config.train_text_encoder or source is None
        if source is None and config.model.preset is not None and not config.train_text_encoder:
            width = get_preset(config.model.preset).config["cross_attention_dim"]
            raise UserError(
                f"preset {config.model.preset} reads text with a CLIP of width {width}: pass "
                "--pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14, or --train_text_encoder to "
                "build one from the captions"
            )
        self._loaded = None if source is None else load_text_encoder_for_training(source, run.device, self.is_trained)

    @property
    def model_config(self) -> dict[str, int]:
        """Config entries with which a built-in small model reads the encoder's hidden states."""
        if self._loaded is None:
            return {"cross_attention_dim": _SMALL_WIDTH, "context_length": _SMALL_LENGTH}
        text_encoder, tokenizer = self._loaded
        length = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
        return {"cross_attention_dim": text_encoder.config.hidden_size, "context_length": length}

    def prepare(self, unet: ModelMixin) -> TextEncoder:
        """Return the encoder and its tokenizer, and make the data loaders add token ids to each batch."""
        run, config = self.run, self.run.config
        loaded = self._loaded or build_text_encoder(run.data, unet, config.optimization.seed)
        self.text_encoder, tokenizer = loaded
        captions = CaptionEncoder(self.text_encoder, tokenizer, unet)
        check_text_encoder(run.data, captions, config.pretrained_text_encoder_name_or_path)
        check_validation_prompts(config.validation_prompts, tokenizer, captions.max_tokens)
        if run.data.precomputed is None:
            read = partial(tokenize, tokenizer=tokenizer, limit=captions.max_tokens)
            run.data.add_tokenizers({"input_ids": read})
            self._empty_ids = read([""]).to(run.device)
        return loaded

    def hidden_states(self, models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        """Return the hidden states of a batch's captions, some of which are replaced by the empty caption."""
        dropped = batch.uniform("dropped condition") < self.run.config.proportion_empty_prompts
        if self.run.data.precomputed is not None:
            return self.run.data.precomputed.text_states(batch, dropped)
        ids = torch.where(dropped[:, None], self._empty_ids, batch["input_ids"])
        return models.get("text_encoder", self.text_encoder)(ids)[0]


def grid_prompts(validation_prompts: Sequence[str] | None, data: TrainingData, num_samples: int) -> list[str]:
    """Return the prompts of a sample grid: all validation prompts in turn, or held-out captions."""
    if validation_prompts is None:
        captions = held_out_captions(data, num_samples)
        return [captions[k % len(captions)] for k in range(num_samples)]
    count = max(num_samples, len(validation_prompts))
    return [validation_prompts[k % len(validation_prompts)] for k in range(count)]


def held_out_captions(data: TrainingData, limit: int | None = None) -> list[str]:
    """Return one caption of each held-out image, or of the first `limit` images."""
    return [data.validation[k].columns["captions"] for k in range(data.validation.num_samples)[:limit]]


def check_validation_prompts(prompts: Sequence[str] | None, tokenizer: CLIPTokenizer, limit: int):
    """Raise a `UserError` if a prompt would be truncated in every grid."""
    for prompt in prompts or ():
        length = len(token_ids([prompt], tokenizer)[0])
        if length > limit:
            raise UserError(
                f"--validation_prompts: {prompt!r} has {length} tokens, but its encoder and model read only {limit}: "
                "shorten it"
            )
