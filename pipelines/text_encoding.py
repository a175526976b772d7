"""Encode text with a CLIP text encoder, in the same way for training and for sampling."""

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import torch
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.download import fetch_file, load_pretrained, read_json
from scalelong_diffusers.errors import UserError


logger = logging.getLogger(__name__)

# Either of these is all that a CLIP tokenizer needs.
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
# The wrong end token in the configs of OpenAI's CLIPs, which Stable Diffusion uses.
_EOS_IN_EARLY_CONFIGS = 2


class CaptionEncoder:
    """
    Encoder for captions, equal to the prompt encoding of [`ScaleLongTextToImagePipeline`]. The empty text is the null
    condition.

    Gradients reach the parameters of the text encoder that require them. Call a text encoder that is wrapped for
    training with the ids from `tokenize`: `text_encoder(encoder.tokenize(captions))[0]`. `model` is the unwrapped
    denoiser that attends to the text.
    """

    def __init__(self, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, model: nn.Module):
        check_text_width(text_encoder, model)
        check_tokenizer(tokenizer, text_encoder)
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens(text_encoder, tokenizer, model)
        self._has_warned = False

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """Return hidden states of shape (captions, tokens, width)."""
        return hidden_states(self.tokenize(captions).to(self.text_encoder.device), self.text_encoder)

    def tokenize(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the token ids on the CPU. The first caption that is too long gets a warning."""
        if not self._has_warned and (cut := truncation_warnings("caption", captions, self.tokenizer, self.max_tokens)):
            self._has_warned = True  # a dataset may have many
            logger.warning("%s; more captions may be cut without a warning", cut[0])
        return tokenize(captions, self.tokenizer, self.max_tokens)


def text_embedding_width(model: nn.Module) -> int:
    """Return the width of the hidden states that a text-conditional model takes."""
    return model.config.get("encoder_hid_dim") or model.config.cross_attention_dim


def max_tokens(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, model: nn.Module | None = None) -> int:
    """Return the number of tokens that tokenizer, encoder and model can all read."""
    limits = [tokenizer.model_max_length, text_encoder.config.max_position_embeddings]
    context_length = None if model is None else model.config.get("context_length")
    return min(limits if context_length is None else [*limits, context_length])


def tokenize(texts: Sequence[str], tokenizer: CLIPTokenizer, limit: int) -> torch.Tensor:
    """Return the token ids, always padded to the limit, because the models are trained that way."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    return tokenizer(texts, padding="max_length", max_length=limit, truncation=True, return_tensors="pt").input_ids


def token_ids(texts: Iterable[str], tokenizer: CLIPTokenizer) -> list[list[int]]:
    """Return the token ids of texts of any length, without transformers' warning about long ones."""
    return tokenizer(list(texts), verbose=False).input_ids


def hidden_states(ids: torch.Tensor, text_encoder: CLIPTextModel) -> torch.Tensor:
    """Return the last hidden states of the text encoder."""
    return text_encoder(ids)[0]


def truncation_warnings(what: str, texts: Sequence[str], tokenizer: CLIPTokenizer, limit: int) -> list[str]:
    """Return a warning for each text that is too long. `what` names the kind of text, such as "prompt"."""
    warnings = []
    for ids in token_ids(dict.fromkeys(texts), tokenizer):
        if len(ids) > limit:
            lost = tokenizer.decode(ids[limit - 1 : -1])  # the last token, the end of the text, is kept
            warnings.append(
                f"a {what} of {len(ids)} tokens is cut to {limit}, the limit of its encoder or model; this part is "
                f"lost: {lost!r}"
            )
    return warnings


def check_text_width(text_encoder: CLIPTextModel, model: nn.Module):
    """Check that the model takes the hidden states of the text encoder."""
    width, expected = text_encoder.config.hidden_size, text_embedding_width(model)
    if width != expected:
        raise UserError(
            f"the text_encoder's hidden states have width {width}, but this {type(model).__name__} takes {expected}: "
            f"create the model with cross_attention_dim={width}, or use another text_encoder"
        )


def check_tokenizer(tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel):
    """Check that the tokenizer belongs to the text encoder."""
    limit = tokenizer.model_max_length
    if not isinstance(limit, int) or limit < 2:  # for the start and the end of a text
        raise UserError(f"the tokenizer must have an integer model_max_length of at least 2, got {limit!r}")
    known, embedded = len(tokenizer), text_encoder.config.vocab_size
    end, expected = tokenizer.eos_token_id, text_encoder.config.eos_token_id
    is_early = expected == _EOS_IN_EARLY_CONFIGS
    if known > embedded or (known != embedded if is_early else end != expected):
        raise UserError(
            f"the tokenizer has {known} tokens and ends texts with {end}, but the text_encoder has {embedded} and "
            f"expects {expected}: they do not belong together"
        )


def load_text_encoder(
    source: str | os.PathLike, dtype: torch.dtype = torch.float32, **hub_options
) -> tuple[CLIPTextModel, CLIPTokenizer]:
    """
    Load CLIP's text encoder and tokenizer from a folder or the Hub.

    The source is a CLIP, such as "openai/clip-vit-large-patch14", or a pipeline that has them as components.
    `hub_options` are `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.
    """
    is_pipeline = read_json(source, "model_index.json", **hub_options) is not None
    folder, tokenizer_folder = ("text_encoder", "tokenizer") if is_pipeline else ("", "")
    # Without its files, transformers creates a tokenizer that maps all captions to the same tokens.
    files = [[str(PurePosixPath(tokenizer_folder, name)) for name in names] for names in _TOKENIZER_FILES]
    if not any(all(fetch_file(source, file, **hub_options) for file in choice) for choice in files):
        accepted = " nor ".join(" and ".join(choice) for choice in files)
        raise UserError(
            f"{source} has no tokenizer: there is neither {accepted}; pass the CLIP or pipeline that the tokenizer "
            "belongs to, or copy its files there"
        )
    hub_options["trust_remote_code"] = False
    text_encoder, report = load_pretrained(
        CLIPTextModel.from_pretrained,
        source,
        subfolder=folder,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **hub_options,
    )
    tokenizer = load_pretrained(CLIPTokenizer.from_pretrained, source, subfolder=tokenizer_folder, **hub_options)
    if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise UserError(
            f"the weights of the text encoder in {source} do not fit its config.json, or it is not a CLIP: {wrong[0]} "
            "is missing or has another shape"
        )
    check_tokenizer(tokenizer, text_encoder)
    return text_encoder.eval(), tokenizer
