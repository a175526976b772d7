"""Texts become hidden states of a CLIP text encoder: the one way for training and for sampling."""

import logging
import os
from collections.abc import Sequence

import torch
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.hub import HubNotReached, read_json


logger = logging.getLogger(__name__)


class CaptionEncoder:
    """
    Reads captions as [`ScaleLongTextToImagePipeline`] reads prompts, so that a model is sampled with the hidden states
    that it was trained with. The empty text is the null condition.

    Gradients reach a text encoder whose parameters ask for them. One that is wrapped for training is called with the
    ids of `tokenize`: `text_encoder(encoder.tokenize(captions))[0]`.

    Args:
        model: the denoiser that is to attend to the text, not wrapped.
    """

    def __init__(self, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, model: nn.Module):
        check_text_width(text_encoder, model)
        check_tokenizer(tokenizer, text_encoder)
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens(text_encoder, tokenizer, model)
        self._has_warned = False

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Hidden states of shape (captions, tokens, width)."""
        return hidden_states(self.tokenize(captions).to(self.text_encoder.device), self.text_encoder)

    def tokenize(self, captions: Sequence[str]) -> torch.Tensor:
        check_texts("captions", captions)
        if not self._has_warned and (cut := cut_texts("caption", captions, self.tokenizer, self.max_tokens)):
            self._has_warned = True  # a data set may have many
            logger.warning("%s; further captions may be cut without being shown", cut[0])
        return tokenize(captions, self.tokenizer, self.max_tokens)


def text_width(model: nn.Module) -> int:
    """The width of the hidden states that a model of text takes."""
    return model.config.get("encoder_hid_dim") or model.config.cross_attention_dim


def max_tokens(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, model: nn.Module | None = None) -> int:
    """How many tokens of a text are read: what tokenizer, encoder and model all can take."""
    limits = [tokenizer.model_max_length, text_encoder.config.max_position_embeddings]
    context_length = None if model is None else model.config.get("context_length")
    return min(limits if context_length is None else [*limits, context_length])


def tokenize(texts: Sequence[str], tokenizer: CLIPTokenizer, limit: int) -> torch.Tensor:
    # Padded to the full length, also where a model takes less, since that is how such models are trained.
    return tokenizer(
        list(texts), padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
    ).input_ids


def hidden_states(ids: torch.Tensor, text_encoder: CLIPTextModel) -> torch.Tensor:
    return text_encoder(ids)[0]


def cut_texts(what: str, texts: Sequence[str], tokenizer: CLIPTokenizer, limit: int) -> list[str]:
    """A sentence for each text that is too long, on what of it is lost; `what` says what the texts are."""
    sentences = []
    for ids in tokenizer(list(dict.fromkeys(texts))).input_ids:
        if len(ids) > limit:
            # The last token says that the text ends, and is kept.
            lost = tokenizer.decode(ids[limit - 1 : -1])
            sentences.append(
                f"a {what} of {len(ids)} tokens is cut to {limit}, the limit of its encoder or model; this part of "
                f"it is lost: {lost!r}"
            )
    return sentences


def check_texts(name: str, texts: Sequence[str]):
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"{name} must be a list of texts, got {texts!r}")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be texts; that at position {row} is {text!r}")
    if not texts:
        raise ValueError(f"{name} is an empty list; give at least one text (which may be empty)")


def check_text_width(text_encoder: CLIPTextModel, model: nn.Module):
    name, width = type(model).__name__, text_encoder.config.hidden_size
    if width != text_width(model):
        raise ValueError(
            f"the text_encoder's hidden states are {width} wide, but this {name} takes {text_width(model)}: make the "
            f"model with cross_attention_dim={width}, or take another text_encoder"
        )


def check_tokenizer(tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel):
    known, embedded = len(tokenizer), text_encoder.config.vocab_size
    if known > embedded:
        raise ValueError(
            f"the tokenizer has {known} tokens, but the text_encoder reads {embedded}: they do not belong together"
        )


def load_text_encoder(
    source: str | os.PathLike, dtype: torch.dtype = torch.float32, **hub_options
) -> tuple[CLIPTextModel, CLIPTokenizer]:
    """
    CLIP's text encoder and tokenizer, from a folder or the Hub: of a CLIP, such as "openai/clip-vit-large-patch14", or
    of a pipeline that has them as components.

    `hub_options` are `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.
    """
    try:
        is_pipeline = read_json(source, "model_index.json", **hub_options) is not None
        folder = "text_encoder/" if is_pipeline else ""
        config = read_json(source, f"{folder}config.json", **hub_options)
    except HubNotReached as error:
        raise HubNotReached(
            f"{error}: download it where there is a network (`hf download {source}`) and give the folder, or have a "
            "small CLIP built from the captions"
        ) from error
    if config is None:
        raise ValueError(f"{source} has no text encoder: there is no {folder}config.json")
    if config.get("model_type") not in ("clip", "clip_text_model"):
        raise ValueError(f"the text encoder must be a CLIP, and {source} has model_type {config.get('model_type')!r}")
    encoder_options = {"subfolder": "text_encoder"} if is_pipeline else {}
    tokenizer_options = {"subfolder": "tokenizer"} if is_pipeline else {}
    text_encoder = CLIPTextModel.from_pretrained(source, dtype=dtype, **encoder_options, **hub_options)
    return text_encoder.eval(), CLIPTokenizer.from_pretrained(source, **tokenizer_options, **hub_options)
