"""
Load Stable Diffusion from one file in its original layout.

Such a file holds weights only. The configs and the tokenizer come from its folder, or from the Hub.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from diffusers.loaders import FromSingleFileMixin
from huggingface_hub import snapshot_download
from torch import nn

from scalelong_diffusers.download import (
    HubUnreachable,
    check_json_files,
    damaged_file_errors,
    download_options,
    hub_errors,
    load_pretrained,
    quiet_transformers,
    use_cache_if_offline,
)
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import single_file_repository


SUFFIXES = (".safetensors", ".ckpt")
_CONFIG_FILES = ("*.json", "*.txt")


def config_source(source: str | os.PathLike, options: Mapping[str, Any] = MappingProxyType({})) -> str | os.PathLike:
    """
    Return the folder with the configs of a Stable Diffusion in one file. Other sources have their own configs.

    `options` are the keywords of `from_pretrained`. Their `revision` is ignored, because a file has none.
    """
    if not os.path.isfile(source):
        return source
    if Path(source).suffix not in SUFFIXES:
        raise UserError(
            f"{source} is not a pipeline: pass a folder written by save_pretrained, or one {' or '.join(SUFFIXES)} "
            "file of Stable Diffusion"
        )
    folder = Path(source).parent
    if (folder / DiffusionPipeline.config_name).is_file():
        return folder
    with damaged_file_errors(source):
        repository = single_file_repository(source)
    if repository is None:
        raise UserError(
            f"{source} is not a Stable Diffusion in one file, whose weights start with model.diffusion_model: pass "
            "the whole folder of a pipeline"
        )
    use_cache_if_offline([repository])
    try:
        with hub_errors(repository):
            hub_options = download_options({**options, "revision": None})
            return snapshot_download(repository, allow_patterns=_CONFIG_FILES, **hub_options)
    except HubUnreachable as error:
        raise HubUnreachable(
            f"{source} holds no configs, and the Hub cannot be reached to get them from {repository}: run `hf "
            f"download {repository} --include '*.json' '*.txt' --local-dir FOLDER` on a machine with a network "
            "connection, and put the file into that FOLDER"
        ) from error


def load_single_file(
    file: str | os.PathLike, folder: str | os.PathLike, class_name: str, **options: Any
) -> DiffusionPipeline:
    """
    Load a pipeline from one file, with the configs in a folder.

    `options` are a dtype and components that replace the ones in the file.
    """
    with quiet_transformers():  # it warns about torchvision, which is not needed
        pipeline_class = getattr(diffusers, str(class_name), None)  # a pipeline with its own code has a list
    if not (isinstance(pipeline_class, type) and issubclass(pipeline_class, FromSingleFileMixin)):
        raise UserError(f"{file} cannot be loaded: {folder} has the configs of a {class_name}")
    for path in (Path(folder), *Path(folder).iterdir()):
        check_json_files(path)
    with _no_dtype_warnings():
        pipe = load_pretrained(pipeline_class.from_single_file, str(file), config=str(folder), **options)
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            _check_complete(component, f"the {name} of {file}")
    return pipe


@contextmanager
def _no_dtype_warnings() -> Iterator[None]:
    """Hide that diffusers warns whenever it loads a single file with a dtype."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_complete(model: nn.Module, what: str):
    """Raise a `UserError` if the file lacks weights: diffusers leaves the missing ones on the meta device."""
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise UserError(f"{what} lacks {len(missing)} weights that its config asks for, for example {missing[0]}")
