"""What evaluation needs beside the package's own requirements."""

import warnings
from contextlib import contextmanager


class MissingPackage(ImportError):
    """A package that is not there or does not work, in a sentence that says how to get it."""


@contextmanager
def torchmetrics_needed(purpose: str):
    """Around imports from torchmetrics and around what its classes say of themselves."""
    try:
        with warnings.catch_warnings():
            # That KID keeps all features is what is wanted here.
            warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance`", category=UserWarning)
            yield
    # torchvision, which torch-fidelity brings along, raises RuntimeError where it does not fit torch.
    except (ImportError, RuntimeError) as error:
        raise MissingPackage(
            f"{purpose} needs torchmetrics, which can not be imported ({error}): "
            "pip install 'scalelong-diffusers[evaluate]'"
        ) from error
