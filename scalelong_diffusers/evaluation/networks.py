"""The networks whose features are compared: Inception, or any vision model of transformers."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from torch import nn

from scalelong_diffusers.download import damaged_file_errors, read_json
from scalelong_diffusers.evaluation.packages import MissingPackage, torchmetrics_needed


INCEPTION = "inception"
# The network of the FID paper, as torch-fidelity converted it from TensorFlow; it never changes.
INCEPTION_FINGERPRINT = "inception-v3-compat-2048"
INCEPTION_WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"


class FeatureExtractor(Protocol):
    """A function from uint8 images (batch, 3, height, width) to (batch, num_features), float."""

    name: str
    fingerprint: str
    num_features: int

    def __call__(self, images: torch.Tensor) -> torch.Tensor: ...


def load_features(source: str, device: torch.device | str = "cpu", revision: str | None = None) -> FeatureExtractor:
    """`"inception"`, or a vision model with its image processor: a local folder or the id of one on the Hub."""
    if source != INCEPTION:
        return TransformersFeatures(source, device, revision)
    if revision is not None:
        raise ValueError(f"a revision is of a model on the Hub, and the features are {INCEPTION}; got {revision!r}")
    return InceptionFeatures(device)


class InceptionFeatures:
    """The 2048 pooled features of the Inception of the FID paper, for figures that compare with published ones."""

    name = INCEPTION
    fingerprint = INCEPTION_FINGERPRINT
    num_features = 2048

    def __init__(self, device: torch.device | str):
        with torchmetrics_needed("Inception"):
            from torchmetrics.image.fid import FrechetInceptionDistance
        try:
            # Without antialiasing, images are scaled to 299 x 299 as in the paper.
            network = FrechetInceptionDistance(self.num_features, antialias=False).inception
        except ModuleNotFoundError as error:
            raise MissingPackage(
                "features of Inception need the package torch-fidelity: pip install torch-fidelity; or take "
                "a vision model of transformers as the features, whose figures compare with one another alone"
            ) from error
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            # A file that is there is not downloaded again, and torch has many ways of saying that it is damaged.
            file = Path(torch.hub.get_dir(), "checkpoints", INCEPTION_WEIGHTS)
            wrong = f"in {file} are damaged" if file.is_file() else f"can not be downloaded ({error})"
            raise OSError(
                f"the weights of Inception {wrong}: put {INCEPTION_WEIGHTS} of torch-fidelity's release v0.2.0 into "
                f"{file.parent}, or take a vision model of transformers as the features"
            ) from error
        self._network = network.to(device)
        self._device = device

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self._network(images.to(self._device))


class TransformersFeatures:
    """
    The pooled features of a vision model: its `pooler_output`, that of `get_image_features` for a model of images and
    text such as CLIP, or the mean over all tokens where the model has no pooler, or the checkpoint no weights for it.
    """

    def __init__(self, source: str, device: torch.device | str = "cpu", revision: str | None = None):
        # The processor in Pillow and numpy: the one in torchvision scales differently, and is not everywhere.
        self._processor = _load_processor(source, revision)
        with damaged_file_errors(source):
            self._model, missing = _load_vision_model(source, revision)
        self._model.to(device).eval().requires_grad_(False)
        self._mean_of_tokens = bool(missing)
        self.name = Path(source).resolve().name if os.path.isdir(source) else source
        self.fingerprint = _fingerprint(self._model, self._processor, missing)
        self.num_features = self._try(source)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        arrays = [image.permute(1, 2, 0).cpu().numpy() for image in images]
        inputs = self._processor(images=arrays, input_data_format="channels_last", return_tensors="pt")
        pixel_values = inputs["pixel_values"].to(self._model.device, self._model.dtype)
        if _reads_text_too(self._model):
            return self._model.get_image_features(pixel_values=pixel_values).pooler_output.float()
        output = self._model(pixel_values=pixel_values)
        pooled = None if self._mean_of_tokens else output.get("pooler_output")
        if pooled is None:
            tokens = output.last_hidden_state  # or (batch, channels, height, width)
            return (tokens.mean(1) if tokens.ndim == 3 else tokens.mean((2, 3))).float()
        return pooled.flatten(1).float()

    def _try(self, source: str) -> int:
        """How many features there are; networks that have none of an image, or others each time, are refused."""
        noise = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        name = type(self._model).__name__
        try:
            once, again = self(noise), self(noise)
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(f"{source} gives no features of an image: {name} ends with {error}") from error
        if not torch.allclose(once, again, rtol=1e-3, atol=1e-3 * once.abs().max().item()):
            raise ValueError(
                f"{source} gives other features of the same image each time: {name} is random, as those are that mask "
                "a part of the image"
            )
        return once.shape[1]


def _load_processor(source: str, revision: str | None):
    from transformers import AutoImageProcessor

    if read_json(source, "config.json", revision=revision) is None:
        raise ValueError(f"{source} is no model of transformers: it has no config.json")
    if read_json(source, "preprocessor_config.json", revision=revision) is None:
        raise ValueError(
            f"{source} has no image processor (preprocessor_config.json), which says how images are brought to its "
            "model: save that of the model beside it"
        )
    try:
        return AutoImageProcessor.from_pretrained(source, revision=revision, backend="pil")
    except (ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(f"the image processor of {source} can not be loaded: {error}") from error


def _load_vision_model(source: str, revision: str | None) -> tuple[nn.Module, list[str]]:
    """The model, and which of its weights are missing, as those of its pooler may be."""
    from transformers import AutoModel
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a table of the weights that a model without its head does not need
    try:
        model, info = AutoModel.from_pretrained(
            source, revision=revision, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{source} can not be loaded as a model of transformers: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    if model.main_input_name != "pixel_values" and not _reads_text_too(model):
        raise ValueError(
            f"{source} is no vision model: {type(model).__name__} reads {model.main_input_name}, not pixel_values"
        )
    missing = sorted(info["missing_keys"])
    if others := [key for key in missing if "pooler" not in key]:
        raise ValueError(f"{source} lacks weights of its {type(model).__name__}, such as {others[0]}")
    return model, missing


def _reads_text_too(model: nn.Module) -> bool:
    return hasattr(model, "get_image_features")


def _fingerprint(model: nn.Module, processor, missing: list[str]) -> str:
    told = sorted((key, str(value)) for key, value in processor.to_dict().items() if key[0] != "_")
    checksum = zlib.crc32(repr((type(model).__name__, told, missing)).encode())
    # What is missing was drawn at random, and plays no part.
    weights = (tensor for name, tensor in model.state_dict().items() if name not in missing)
    return f"{_checksum(weights, checksum):08x}"


def _checksum(tensors: Iterable[torch.Tensor], checksum: int) -> int:
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy(), checksum)
    return checksum
