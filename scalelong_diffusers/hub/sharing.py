"""Push models and pipelines to the Hub, with a card that says how they are scaled."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import HfApi, ModelCard

from scalelong_diffusers.download import fetch_file, hub_errors
from scalelong_diffusers.hub.adapters import save_adapter
from scalelong_diffusers.hub.model_card import SAMPLES, CardFacts, make_adapter_card, make_card


_LOADER = '''\
"""Lets diffusers load what is here with trust_remote_code=True, without anything being imported before."""

try:
    from scalelong_diffusers import {names}  # noqa: F401
except ImportError as error:
    raise ImportError("this model needs the package scalelong-diffusers: pip install scalelong-diffusers") from error
'''


def push_to_hub(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    create_pr: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    card: CardFacts | Mapping[str, Any] | None = None,
    loader_files: bool = False,
    **save_options,
) -> str:
    """
    Push a model or a pipeline, ours or a stock one with a scaled U-Net in it, and return the address of the commit.

    Args:
        repo_id: `user/name`; the repository is made where there is none.
        private: whether a repository that is made is private.
        create_pr: open a pull request instead of writing to the branch.
        revision: the branch, which is made where there is none; `main` by default.
        subfolder: where in the repository; without a model card.
        card: what the model card says beyond what the model tells: [`CardFacts`], or a dict of its fields.
        loader_files: add small files with which `trust_remote_code=True` loads the repository without this package
            being imported. Who loads it then has to pass that, also with the package.
        save_options: of `save_pretrained`: `variant`, `max_shard_size`, `safe_serialization`.

    ```python
    push_to_hub(pipe, "user/my-model", card={"training_data": "CIFAR-10", "samples": grid})
    ```
    """
    card = CardFacts.parse(card)
    load_options = {"revision": revision, "variant": save_options.get("variant"), "trust_remote_code": loader_files}
    load_options = {name: value for name, value in load_options.items() if value}

    def save(folder: str):
        model_or_pipeline.save_pretrained(folder, **save_options)
        if loader_files:
            add_loader_files(folder)

    def write_card(folder: str, repo_id: str, previous: str | None):
        if subfolder is None:
            _write_card(make_card(model_or_pipeline, repo_id, card, previous, load_options), card, folder)

    return _push(
        repo_id,
        save,
        write_card,
        commit_message=commit_message or f"Upload {type(model_or_pipeline).__name__}",
        private=private,
        token=token,
        create_pr=create_pr,
        revision=revision,
        subfolder=subfolder,
    )


def push_adapter(
    pipe: DiffusionPipeline,
    repo_id: str,
    base_model: str | None = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    create_pr: bool = False,
    revision: str | None = None,
    card: CardFacts | Mapping[str, Any] | None = None,
) -> str:
    """
    Push what `save_adapter` saves of a pipeline, and return the address of the commit.

    Args:
        base_model: the repository that the adapter is loaded into; by default the one that the pipeline came from.

    The other arguments are those of [`push_to_hub`].

    ```python
    push_adapter(pipe, "user/my-adapter", base_model="some/sd", card={"training_data": "my photographs"})
    ```
    """
    card = CardFacts.parse(card)
    base_model = _repository_of(pipe) if base_model is None else base_model

    def write_card(folder: str, repo_id: str, previous: str | None):
        _write_card(make_adapter_card(pipe, base_model, repo_id, card, previous, revision), card, folder)

    return _push(
        repo_id,
        lambda folder: save_adapter(pipe, folder),
        write_card,
        commit_message=commit_message or f"Upload an adapter of {base_model}",
        private=private,
        token=token,
        create_pr=create_pr,
        revision=revision,
    )


def _push(
    repo_id: str,
    save: Callable[[str], None],
    write_card: Callable[[str, str, str | None], None],
    *,
    commit_message: str,
    private: bool | None,
    token: str | None,
    create_pr: bool,
    revision: str | None,
    subfolder: str | None = None,
) -> str:
    """Upload what `save` puts into a folder, with the card of `write_card(folder, repo_id, previous)`."""
    if create_pr and revision is not None:
        raise ValueError(f"a pull request is opened against main: give create_pr or revision={revision!r}, not both")
    api = HfApi(token=token)
    with hub_errors(repo_id, revision), tempfile.TemporaryDirectory() as folder:
        # What can fail here comes before anything is made on the Hub. The card is written for that alone: what it
        # keeps of the previous one is known only once the repository is there.
        save(folder)
        write_card(folder, repo_id, None)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        write_card(folder, repo_id, _card_on_hub(repo_id, token, revision))
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                path_in_repo=subfolder,
                commit_message=commit_message,
                create_pr=create_pr,
                revision=revision,
            )
        )


def write_model_card(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    folder: str | os.PathLike,
    repo_id: str,
    facts: CardFacts | None = None,
    token: str | None = None,
    load_options: Mapping[str, Any] | None = None,
):
    """
    Write the card, and the picture of samples, into a folder that is about to be uploaded.

    `load_options` are the keywords that `from_pretrained` needs to load what is pushed.
    """
    load_options, facts = load_options or {}, facts or CardFacts()
    previous = _card_on_hub(repo_id, token, load_options.get("revision"))
    _write_card(make_card(model_or_pipeline, repo_id, facts, previous, load_options), facts, folder)


def _card_on_hub(repo_id: str, token: str | None, revision: str | None) -> str | None:
    file = fetch_file(repo_id, "README.md", token=token, revision=revision)
    return None if file is None else Path(file).read_text(encoding="utf-8")


def _write_card(card: ModelCard, facts: CardFacts, folder: str | os.PathLike):
    card.save(os.path.join(folder, "README.md"))
    if facts.samples is not None:
        facts.samples.save(os.path.join(folder, SAMPLES))


def _repository_of(pipe: DiffusionPipeline) -> str:
    source = pipe.config.get("_name_or_path")
    if source is None or os.path.exists(source):
        raise ValueError(
            "base_model must name the repository on the Hub that the adapter is loaded into; this pipeline was loaded "
            f"from {source or 'nowhere'}"
        )
    return source


def add_loader_files(folder: str | os.PathLike):
    """Add to a saved model or pipeline what makes `trust_remote_code=True` find its classes in this package."""
    index_file = Path(folder, DiffusionPipeline.config_name)
    if not index_file.is_file():
        config_file = Path(folder, ModelMixin.config_name)
        config = json.loads(config_file.read_text())
        name = config["_class_name"]
        _write_loader(Path(folder, "loader.py"), [name])
        _write_json(config_file, {**config, "auto_map": {"AutoModel": f"loader.{name}"}})
        return
    index = json.loads(index_file.read_text())
    for component, entry in index.items():
        if isinstance(entry, list) and entry[0] == "scalelong_diffusers":
            # diffusers looks in the component's folder for a file with the name of its library.
            _write_loader(Path(folder, component, "scalelong_diffusers.py"), [entry[1]])
    name = index["_class_name"]
    if name.startswith("ScaleLong"):
        _write_loader(Path(folder, "pipeline.py"), [name])
        _write_json(index_file, {**index, "_class_name": ["pipeline", name]})


def _write_loader(file: Path, names: list[str]):
    file.write_text(_LOADER.format(names=", ".join(names)))


def _write_json(file: Path, content: dict[str, Any]):
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
