"""The text of a run: the encoder that reads captions, named or built from them, and the prompts of the sample grid."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import ModelMixin
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.data import Batch, TrainingData
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder, text_embedding_width, token_ids
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer


TextEncoder = tuple[CLIPTextModel, CLIPTokenizer]

# Of a small CLIP, where the model that is to attend to it says nothing else.
_SMALL_WIDTH, _SMALL_LENGTH = 128, 32
_HEAD_WIDTH = 32
# Tokens that are read where the model sets no limit; that of the published CLIP.
_LONGEST = 77


def load_text_encoder_for_training(source: str, device: torch.device) -> TextEncoder:
    text_encoder, tokenizer = load_text_encoder(source)
    return text_encoder.requires_grad_(False).to(device), tokenizer


def load_named_text_encoder(args: argparse.Namespace, accelerator: Accelerator) -> TextEncoder | None:
    """The CLIP of `--pretrained_text_encoder_name_or_path`, frozen unless it is to be trained; None where none is."""
    source = args.pretrained_text_encoder_name_or_path
    if source is None:
        return None
    text_encoder, tokenizer = load_text_encoder(source)
    return text_encoder.requires_grad_(args.train_text_encoder).to(accelerator.device), tokenizer


def text_condition(text: TextEncoder | None) -> dict[str, Any]:
    """What the encoder asks of a model that is built for it, for `build_model`."""
    if text is None:
        return {"cross_attention_dim": _SMALL_WIDTH, "context_length": _SMALL_LENGTH}
    text_encoder, tokenizer = text
    length = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
    return {"cross_attention_dim": text_encoder.config.hidden_size, "context_length": length}


def build_text_encoder(args: argparse.Namespace, data: TrainingData, model: ModelMixin) -> TextEncoder:
    """
    A small CLIP that fits the model, built from the captions that it is trained on. Its weights follow the seed.

    It reads as many tokens as the longest caption has: what is padded takes time, and hides what is said.
    """
    captions = list(data.train.captions())
    width, limit = text_embedding_width(model), model.config.get("context_length", _LONGEST)
    tokenizer = build_tokenizer(captions, limit)
    longest = max(map(len, token_ids(dict.fromkeys(captions), tokenizer)))
    tokenizer.model_max_length = min(longest, limit)
    torch.manual_seed(seed_for(args.seed, "text_encoder"))
    num_heads = width // _HEAD_WIDTH if width % _HEAD_WIDTH == 0 else 1
    return build_text_model(tokenizer, width, num_attention_heads=num_heads), tokenizer


def leave_out(batch: Batch, proportion: float) -> list[str]:
    """The captions of a batch, some of them empty."""
    draws = batch.uniform("empty caption").tolist()
    return ["" if draw < proportion else caption for draw, caption in zip(draws, batch["captions"])]


def grid_prompts(args: argparse.Namespace, data: TrainingData) -> list[str]:
    """The prompts of the sample grid: all of `--validation_prompts`, in turn, or captions that were held out."""
    given = args.validation_prompts
    if given is not None:
        return [given[k % len(given)] for k in range(max(args.num_samples, len(given)))]
    captions = held_out_captions(data, args.num_samples)
    return [captions[k % len(captions)] for k in range(args.num_samples)]


def held_out_captions(data: TrainingData, limit: int | None = None) -> list[str]:
    """A caption of each image that is held out, or of the first ones."""
    return [data.validation[k].columns["captions"] for k in range(data.validation.num_samples)[:limit]]


def check_validation_prompts(prompts: Sequence[str] | None, tokenizer: CLIPTokenizer, limit: int):
    for prompt in prompts or ():
        length = len(token_ids([prompt], tokenizer)[0])
        if length > limit:
            raise ValueError(
                f"--validation_prompts: {prompt!r} has {length} tokens, and its encoder and model read {limit}: "
                "shorten it"
            )
