"""Read files from a folder or the Hub, and turn the errors of Hub and file formats into one-line messages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache

# HTTPError comes from the client's HTTP library and also covers a Hub that does not answer.
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import read_json_file


# The keywords of `from_pretrained` that choose what is read from the Hub.
DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


class HubUnreachable(UserError):
    """The Hub does not answer, and the file is not in the cache."""


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
    except HTTPError as error:
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
    advice = "; your token (`hf auth whoami`) does not allow it" if status in (401, 403) else ""
    return f"the Hub refused the request for {source} with status {status}{advice}"


@contextmanager
def damaged_file_errors(source: str | os.PathLike) -> Iterator[None]:
    """Turn the errors of diffusers, transformers and torch about damaged files into one-line messages."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, JSONDecodeError, UnpicklingError, EOFError) as error:
        if "ignore_mismatched_sizes" in str(error):  # transformers suggests an option that we do not pass
            problem = f"weights of a component of {source} do not fit its config.json"
        elif damage := _damage(error):
            # torch's own message is about trusting a pickle, or names a line of its C++ code.
            is_torch = not isinstance(damage, (SafetensorError, JSONDecodeError))
            reason = "not a complete PyTorch file" if is_torch else " ".join(str(error).split())
            # diffusers applies force_download only to the configs of a pipeline, so it would not help.
            is_local = os.path.exists(source)
            advice = "save or copy it again" if is_local else f"load again after `hf cache rm model/{source}`"
            what = "JSON files" if isinstance(damage, JSONDecodeError) else "weights"
            problem = f"{what} in {source} are damaged or incompletely downloaded ({reason}): {advice}"
        else:
            raise
        raise UserError(f"the {problem}") from error


def _damage(error: BaseException | None) -> BaseException | None:
    """Return the error about a damaged file among an error and its causes."""
    while error is not None:
        is_known = isinstance(error, (SafetensorError, JSONDecodeError, UnpicklingError, EOFError))
        if is_known or "PytorchStreamReader" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None
