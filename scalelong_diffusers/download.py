"""What is read from the Hub and written to it, and what goes wrong there, in one sentence."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache

# HTTPError is that of the client's HTTP library, and covers a Hub that does not answer.
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


# The keywords of `from_pretrained` that say where on the Hub to look.
DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


class HubUnreachable(OSError):
    """The Hub does not answer, and the cache does not have what was asked for."""


def read_json(source: str | os.PathLike, name: str, **download_options) -> dict[str, Any] | None:
    """A file of a local folder or of a repository on the Hub; None where there is no such file in it."""
    path = fetch_file(source, name, **download_options)
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not the config of a model or pipeline: it holds {content!r:.60}")
    return content


def fetch_file(source: str | os.PathLike, name: str, **download_options) -> str | None:
    """The path of a file of a local folder, or of one on the Hub once it is downloaded; None where there is none."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        return path if os.path.isfile(path) else None
    with hub_errors(source, download_options.get("revision")):
        try:
            return hf_hub_download(str(source), name, **download_options)
        except LocalEntryNotFoundError:
            # The cache remembers of a repository, too, which files it does not have.
            places = {key: download_options[key] for key in ("cache_dir", "revision") if key in download_options}
            if try_to_load_from_cache(str(source), name, **places) is not _CACHED_NO_EXIST:
                raise
            return None
        except EntryNotFoundError:
            return None


@contextmanager
def hub_errors(source: str | os.PathLike, revision: str | None = None):
    """The client's errors have several lines, name the client's functions, and do not say what to do."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise HubUnreachable(f"{source} is no local folder, and the Hub can not be reached to look for it") from error
    except HFValidationError as error:
        raise ValueError(
            f"{source} is neither a local folder nor a repository on the Hub, whose ids are like user/name"
        ) from error
    except GatedRepoError as error:
        raise OSError(f"{source} is open only to those whom its owner lets in: ask on its page on the Hub") from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"{source} is neither a local folder nor a repository on the Hub that you may read; for a private one log "
            "in with `hf auth login`, or pass token"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{source} has no branch, tag or commit {revision!r}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; your token (`hf auth whoami`) does not allow it" if status in (401, 403) else ""
        raise OSError(f"the Hub refused the request for {source} with status {status}{advice}") from error
    except HTTPError as error:
        raise OSError(f"the Hub can not be reached for {source}: {error}") from error


@contextmanager
def damaged_file_errors(source: str | os.PathLike):
    """
    Name what ends too early, weights or JSON, and weights that are not of their config. diffusers, transformers and
    torch each have their way of reporting one.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, JSONDecodeError, UnpicklingError, EOFError) as error:
        if "ignore_mismatched_sizes" in str(error):
            # transformers has shown which they are, and advises an option that is not passed on here.
            raise ValueError(f"{source} has a component whose weights do not fit its config.json") from error
        damage = next(filter(_is_damage, _with_causes(error)), None)
        if damage is None:
            raise
        what = "JSON files" if isinstance(damage, JSONDecodeError) else "weights"
        # torch says of a pickle that one could trust it, and of a zip archive the line that saw it.
        of_torch = not isinstance(damage, (SafetensorError, JSONDecodeError))
        said = "no whole file of torch" if of_torch else " ".join(str(error).split())
        # force_download does not help: diffusers takes it for the configs of a pipeline alone.
        advice = "save or copy it again" if os.path.isdir(source) else f"load again after `hf cache rm model/{source}`"
        raise OSError(
            f"the {what} in {source} are damaged, or were not downloaded to their end ({said}): {advice}"
        ) from error


def _is_damage(error: BaseException) -> bool:
    is_known = isinstance(error, (SafetensorError, JSONDecodeError, UnpicklingError, EOFError))
    return is_known or "PytorchStreamReader" in str(error)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
