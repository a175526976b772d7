"""What evaluation needs beside the package's own requirements."""

import warnings
from contextlib import contextmanager

import torch


class MissingPackage(ImportError):
    """A package that is not there or does not work, in a sentence that says what to do."""


@contextmanager
def torchmetrics_needed(purpose: str):
    """Around imports from torchmetrics, and around what its classes say of themselves."""
    try:
        with warnings.catch_warnings():
            # That KID keeps all features is what is wanted here.
            warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance`", category=UserWarning)
            yield
    except ModuleNotFoundError as error:
        # torchmetrics imports torch-fidelity where there is one, and that torchvision.
        package = error.name.split(".")[0]
        needed = "'scalelong-diffusers[evaluate]'" if package == "torchmetrics" else package
        raise MissingPackage(f"{purpose} needs torchmetrics, and {error}: pip install {needed}") from error
    except RuntimeError as error:
        raise MissingPackage(
            f"{purpose} needs torchmetrics, which imports torch-fidelity and torchvision where they are there, and "
            f"fails: {error}; install the torchvision that fits torch {torch.__version__}"
        ) from error
