"""Read files and models from a folder or the Hub, and turn the errors of both into one-line messages."""

import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import _CACHED_NO_EXIST, constants, get_session, hf_hub_download, try_to_load_from_cache

# HTTPError comes from the client's HTTP library and also covers a Hub that does not answer.
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import read_json_file
from scalelong_diffusers.internals import code_questions_refused
from scalelong_diffusers.memory import limited_layers


_DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")

# What diffusers and transformers read. A folder may hold JSON of other libraries.
_JSON_FILES = (
    *("model_index.json", "*config.json", "*.index.json", "tokenizer.json", "vocab.json", "added_tokens.json"),
    "special_tokens_map.json",
)


class HubUnreachable(UserError):
    """The Hub does not answer, and the file is not in the cache."""


def download_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keywords of `from_pretrained` that choose what is read from the Hub."""
    return {name: options[name] for name in _DOWNLOAD_OPTIONS if name in options}


def read_json(source: str | os.PathLike, name: str, **download_options) -> dict[str, Any] | None:
    """Read a JSON file from a folder or a Hub repository. Return None if there is no such file."""
    path = fetch_file(source, name, **download_options)
    return None if path is None else read_json_file(Path(path))


def fetch_file(source: str | os.PathLike, name: str, **download_options) -> str | None:
    """Return the path of a file in a folder or, once downloaded, on the Hub. Return None if it does not exist."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        return path if os.path.isfile(path) else None
    with hub_errors(source, download_options.get("revision")):
        try:
            return hf_hub_download(str(source), name, **download_options)
        except LocalEntryNotFoundError:
            # The cache also remembers which files a repository does not have.
            places = {key: download_options[key] for key in ("cache_dir", "revision") if key in download_options}
            if try_to_load_from_cache(str(source), name, **places) is not _CACHED_NO_EXIST:
                raise
            return None
        except EntryNotFoundError:
            return None


def check_repo_id(name: str, repo_id: str):
    """Raise a `UserError` if a value, which the message calls `name`, cannot be the id of a Hub repository."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{name} must be a Hub repository, whose ids look like user/name, got {repo_id!r}") from error


def use_cache_if_offline(sources: Iterable[str]):
    """
    Switch to the Hub's offline mode if a source is on the Hub and the Hub cannot be reached.

    Otherwise the Hub's client would retry for half a minute for each file before it uses its cache.
    """
    if constants.HF_HUB_OFFLINE or all(map(os.path.exists, sources)):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError:
        constants.HF_HUB_OFFLINE = True


@contextmanager
def hub_errors(source: str | os.PathLike, revision: str | None = None) -> Iterator[None]:
    """Turn the errors of the Hub's client into one-line messages that say what to do."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        advice = f"run `hf download {source}` on a machine with a network connection, and pass the folder"
        raise HubUnreachable(f"{source} is not a local folder, and the Hub cannot be reached: {advice}") from error
    except (HFValidationError, HfHubHTTPError) as error:
        raise UserError(_refusal(error, source, revision)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise HubUnreachable(f"the Hub cannot be reached for {source}: {error}") from error


def _refusal(error: Exception, source: str | os.PathLike, revision: str | None) -> str:
    if isinstance(error, HFValidationError):
        return f"{source} is neither a local folder nor a Hub repository, whose ids look like user/name"
    if isinstance(error, GatedRepoError):
        return f"{source} is gated: request access on its page on the Hub"
    if isinstance(error, RevisionNotFoundError):
        return f"{source} has no branch, tag or commit {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{source} is neither a local folder nor a Hub repository that you can read; for a private one log in "
            "with `hf auth login`, or pass token"
        )
    status = error.response.status_code
    advice = {
        401: "; log in with `hf auth login`, or set HF_TOKEN",
        403: "; your token (`hf auth whoami`) does not allow it",
    }
    return f"the Hub refused the request for {source} with status {status}{advice.get(status, '')}"


def load_pretrained(load: Callable, source: str | os.PathLike, *, subfolder: str = "", **options) -> Any:
    """
    Call `load`, the `from_pretrained` of a class of diffusers or transformers, on files that may be malicious.

    Code in the source is never run. Damaged files and absurdly deep models raise a `UserError`.
    """
    if os.path.isdir(source):
        check_json_files(Path(source, subfolder))
    if subfolder:
        options["subfolder"] = subfolder
    with damaged_file_errors(source), limited_layers(source), quiet_transformers(), code_questions_refused():
        return load(source, **options)


def load_model(model_class: type, source: str | os.PathLike, what: str, **options) -> nn.Module:
    """
    Load a model. Raise a `UserError` if it lacks weights: transformers would draw random ones and only warn.

    `what` names the model in the error.
    """
    model, info = load_pretrained(model_class.from_pretrained, source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{what} lacks {len(missing)} weights that a {model_class.__name__} with its config has, for example "
            f"{missing[0]}: save or copy it again"
        )
    return model


def build_skeleton(model_class: type[nn.Module], config: Mapping[str, Any], source: str, **changes) -> nn.Module:
    """Build the model of a config on the meta device, where it takes no memory. Errors name `source`."""
    with damaged_file_errors(source), limited_layers(source), torch.device("meta"):
        return model_class.from_config(config, **changes)


def check_json_files(folder: Path):
    """
    Check that the JSON files that diffusers and transformers read hold objects.

    Check also that the files of sharded weights are in the same folder: other paths would be followed.
    """
    for file in sorted({file for pattern in _JSON_FILES for file in folder.glob(pattern)}):
        content = read_json_file(file)
        if file.name.endswith(".index.json"):
            shards = content.get("weight_map")
            if not isinstance(shards, dict):
                raise UserError(f"{file} must have an object weight_map, got {reprlib.repr(shards)}")
            for shard in shards.values():
                if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard:
                    raise UserError(f"{file} must name files in its folder, got {shard!r:.200}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' table of weights that do not fit; an error replaces it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def damaged_file_errors(source: str | os.PathLike) -> Iterator[None]:
    """
    Turn the errors of diffusers, transformers and torch about files into one-line messages.

    Their readers raise almost any exception for damaged files: tokenizers raises a plain `Exception`. The message
    names the source of the outermost block, which is what the user passed.
    """
    if _is_reading.get():
        yield
        return
    token = _is_reading.set(True)
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(_describe(error, source)) from error
    finally:
        _is_reading.reset(token)


_is_reading = ContextVar("is_reading", default=False)


def _describe(error: Exception, source: str | os.PathLike) -> str:
    """Describe an error that a reader of files raised."""
    # diffusers applies force_download only to the configs of a pipeline, so it would not help.
    is_local = os.path.exists(source)
    advice = "save or copy it again" if is_local else f"load again after `hf cache rm model/{source}`"
    damaged = "are damaged or incompletely downloaded"
    for cause in _causes(error):
        reason = " ".join(str(cause).split())
        if "ignore_mismatched_sizes" in reason:  # transformers suggests an option that we do not pass
            return f"weights in {source} do not fit their config.json"
        if "trust_remote_code" in reason:
            return f"{source} needs code that it contains, and such code is never run: load it with its own library"
        if isinstance(cause, UnpicklingError):
            return (
                f"the weights in {source} are damaged or hold more than tensors, which is refused because a pickle "
                "can run code: save them as safetensors"
            )
        if isinstance(cause, SafetensorError):
            return f"the weights in {source} {damaged} ({reason}): {advice}"
        if isinstance(cause, EOFError) or "PytorchStreamReader" in reason:  # torch names a line of its C++ code
            return f"the weights in {source} {damaged} (not a complete PyTorch file): {advice}"
        if "out of meta tensor" in reason:
            return f"{source} lacks weights that its configs ask for: {advice}"
        if absent := re.match(r"Failed to load (\w+)\. Weights for this component", reason):
            return f"{source} has no weights of an {absent[1]}: pass this component to load_pipeline in Python"
        if isinstance(cause, JSONDecodeError):
            return f"the JSON files in {source} {damaged} ({reason}): {advice}"
    return f"{source} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
