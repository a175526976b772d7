"""Feature networks: Inception, or any vision model of transformers."""

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import nn

from scalelong_diffusers.download import load_pretrained
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.metrics import (
    INCEPTION,
    INCEPTION_FEATURES,
    INCEPTION_FINGERPRINT,
    torchmetrics_needed,
)
from scalelong_diffusers.files import checksum


INCEPTION_WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"


class FeatureExtractor(Protocol):
    """A function from uint8 images (batch, 3, height, width) to float features (batch, num_features)."""

    name: str
    fingerprint: str
    num_features: int

    def __call__(self, images: torch.Tensor) -> torch.Tensor: ...


def load_features(source: str, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Load `"inception"`, or a vision model with its image processor from a folder or the Hub."""
    return InceptionFeatures(device) if source == INCEPTION else TransformersFeatures(source, device)


class InceptionFeatures:
    """The 2048 pooled features of the FID paper's Inception, comparable with published results."""

    name = INCEPTION
    fingerprint = INCEPTION_FINGERPRINT
    num_features = INCEPTION_FEATURES

    def __init__(self, device: torch.device | str):
        with torchmetrics_needed("the Inception network"):
            from torchmetrics.image.fid import FrechetInceptionDistance

            try:
                # Without antialiasing, images are resized to 299 x 299 as in the paper.
                network = FrechetInceptionDistance(self.num_features, antialias=False).inception
            except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
                # torch does not download an existing file again, and reports damaged ones in many ways.
                file = Path(torch.hub.get_dir(), "checkpoints", INCEPTION_WEIGHTS)
                fault = f"in {file} are damaged" if file.is_file() else f"cannot be downloaded ({error})"
                raise UserError(
                    f"the weights of Inception {fault}: put {INCEPTION_WEIGHTS} of torch-fidelity's release v0.2.0 "
                    f"into {file.parent}, or use the features of a vision model of transformers"
                ) from error
        self._network = network.to(device)
        self._device = device

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self._network(images.to(self._device))


class TransformersFeatures:
    """
    The pooled features of a vision model of transformers.

    These are its `pooler_output`, or `get_image_features` for a model of images and text such as CLIP, or the mean of
    all tokens if the model has no pooler or the checkpoint has no weights for it.
    """

    def __init__(self, source: str, device: torch.device | str = "cpu"):
        self._processor, self._model, missing = _load(source)
        self._model.to(device).eval().requires_grad_(False)
        self._uses_mean_of_tokens = bool(missing)
        self.name = Path(source).resolve().name if os.path.isdir(source) else source
        self.fingerprint = _fingerprint(self._model, self._processor, missing)
        self.num_features = self._count_features(source)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        arrays = [image.permute(1, 2, 0).cpu().numpy() for image in images]
        inputs = self._processor(images=arrays, input_data_format="channels_last", return_tensors="pt")
        pixel_values = inputs["pixel_values"].to(self._model.device, self._model.dtype)
        if _also_reads_text(self._model):
            return self._model.get_image_features(pixel_values=pixel_values).pooler_output.float()
        output = self._model(pixel_values=pixel_values)
        pooled = None if self._uses_mean_of_tokens else output.get("pooler_output")
        if pooled is None:
            tokens = output.last_hidden_state  # or (batch, channels, height, width)
            return (tokens.mean(1) if tokens.ndim == 3 else tokens.mean((2, 3))).float()
        return pooled.flatten(1).float()

    def _count_features(self, source: str) -> int:
        """Return the number of features. Reject networks without features of an image, and random ones."""
        noise = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        name = type(self._model).__name__
        try:
            first, second = self(noise), self(noise)
        except (ValueError, TypeError, AttributeError, ArithmeticError, IndexError, RuntimeError) as error:
            raise UserError(f"{source} has no image features: {name} fails with {error}") from error
        if not first.isfinite().all():
            raise UserError(f"{source} has no image features: {name} gives values that are not finite")
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * first.abs().max().item()):
            raise UserError(f"{source} gives different features for the same image: {name} is random")
        return first.shape[1]


def _load(source: str) -> tuple[Any, nn.Module, list[str]]:
    """Return the image processor, the model, and the names of its missing weights, which only the pooler may have."""
    from transformers import AutoImageProcessor, AutoModel

    # The processor that uses Pillow; the one that uses torchvision resizes differently.
    processor = load_pretrained(AutoImageProcessor.from_pretrained, source, backend="pil", trust_remote_code=False)
    model, info = load_pretrained(
        AutoModel.from_pretrained, source, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    missing = sorted(info["missing_keys"])
    if others := [key for key in missing if "pooler" not in key]:
        raise UserError(f"{source} lacks weights of its {type(model).__name__}, such as {others[0]}")
    return processor, model, missing


def _also_reads_text(model: nn.Module) -> bool:
    return hasattr(model, "get_image_features")


def _fingerprint(model: nn.Module, processor, missing: list[str]) -> str:
    settings = sorted((key, str(value)) for key, value in processor.to_dict().items() if key[0] != "_")
    # Missing weights are random and unused.
    weights = (tensor for name, tensor in model.state_dict().items() if name not in missing)
    return checksum(repr((type(model).__name__, settings, missing)), *weights)[:16]
