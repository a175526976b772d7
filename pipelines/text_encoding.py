"""Texts become hidden states of a CLIP text encoder: the one way for training and for sampling."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from scalelong_diffusers.download import HubUnreachable, damaged_file_errors, fetch_file, read_json


logger = logging.getLogger(__name__)

# Either is all that a CLIP's tokenizer is made of.
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
# The end of a text in the configs of OpenAI's CLIPs, Stable Diffusion's among them, whose tokenizers have another.
_EOS_IN_EARLY_CONFIGS = 2


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
        if not self._has_warned and (cut := truncation_warnings("caption", captions, self.tokenizer, self.max_tokens)):
            self._has_warned = True  # a data set may have many
            logger.warning("%s; further captions may be cut without being shown", cut[0])
        return tokenize(captions, self.tokenizer, self.max_tokens)


def text_embedding_width(model: nn.Module) -> int:
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


def token_ids(texts: Iterable[str], tokenizer: CLIPTokenizer) -> list[list[int]]:
    """Of whole texts, of any length: transformers would warn of long ones, and who asks for this says it better."""
    return tokenizer(list(texts), verbose=False).input_ids


def hidden_states(ids: torch.Tensor, text_encoder: CLIPTextModel) -> torch.Tensor:
    return text_encoder(ids)[0]


def truncation_warnings(what: str, texts: Sequence[str], tokenizer: CLIPTokenizer, limit: int) -> list[str]:
    """A sentence for each text that is too long, on what of it is lost; `what` says what the texts are."""
    sentences = []
    for ids in token_ids(dict.fromkeys(texts), tokenizer):
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
    if width != text_embedding_width(model):
        raise ValueError(
            f"the text_encoder's hidden states are {width} wide, but this {name} takes {text_embedding_width(model)}: make the "
            f"model with cross_attention_dim={width}, or take another text_encoder"
        )


def check_tokenizer(tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel):
    known, embedded = len(tokenizer), text_encoder.config.vocab_size
    end, expected = tokenizer.eos_token_id, text_encoder.config.eos_token_id
    if known > embedded or (expected == _EOS_IN_EARLY_CONFIGS and known != embedded):
        raise ValueError(
            f"the tokenizer has {known} tokens, but the text_encoder reads {embedded}: they do not belong together"
        )
    if expected not in (end, _EOS_IN_EARLY_CONFIGS):
        raise ValueError(
            f"the tokenizer ends a text with token {end}, but the text_encoder knows its end by token {expected}: "
            "they do not belong together"
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
        folder, tokenizer_folder = ("text_encoder", "tokenizer") if is_pipeline else ("", "")
        config_file = str(PurePosixPath(folder, "config.json"))
        _check_clip(source, config_file, read_json(source, config_file, **hub_options))
        _check_tokenizer_files(source, tokenizer_folder, hub_options)
    except HubUnreachable as error:
        raise HubUnreachable(
            f"{error}: download it where there is a network (`hf download {source}`) and give the folder, or have a "
            "small CLIP built from the captions"
        ) from error
    with damaged_file_errors(source), _without_report():
        text_encoder, report = CLIPTextModel.from_pretrained(
            source,
            subfolder=folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **hub_options,
        )
        tokenizer = CLIPTokenizer.from_pretrained(source, subfolder=tokenizer_folder, **hub_options)
    if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"the weights of the text encoder in {source} do not fit its {config_file}: {wrong[0]} is missing or has "
            "another shape"
        )
    check_tokenizer(tokenizer, text_encoder)
    return text_encoder.eval(), tokenizer


def _check_clip(source: str | os.PathLike, config_file: str, config: dict[str, Any] | None):
    if config is None:
        raise ValueError(f"{source} has no text encoder: there is no {config_file}")
    if config.get("model_type") not in ("clip", "clip_text_model"):
        raise ValueError(f"the text encoder must be a CLIP, and {source} has model_type {config.get('model_type')!r}")


def _check_tokenizer_files(source: str | os.PathLike, folder: str, hub_options: dict[str, Any]):
    """Without these files transformers makes a tokenizer that knows no words, to which all captions are the same."""
    choices = [[str(PurePosixPath(folder, name)) for name in names] for names in _TOKENIZER_FILES]
    for files in choices:
        if all(fetch_file(source, file, **hub_options) is not None for file in files):
            return
    accepted = " nor ".join(" and ".join(files) for files in choices)
    raise ValueError(
        f"{source} has a text encoder without a tokenizer: there is neither {accepted}; give the pipeline that it is "
        "a part of, or put the files of its tokenizer there"
    )


@contextmanager
def _without_report() -> Iterator[None]:
    """transformers shows a table of weights that do not fit, which end in a sentence here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
