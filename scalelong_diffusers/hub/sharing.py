"""Push models, pipelines and adapters to the Hub, with a model card that describes their skip scaling."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import HfApi, ModelCard

from scalelong_diffusers.download import check_repo_id, fetch_file, hub_errors, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.hub.adapters import save_adapter
from scalelong_diffusers.hub.model_card import (
    SAMPLES,
    CardFacts,
    last_samples,
    make_adapter_card,
    make_card,
    training_facts,
)


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
    **save_options,
) -> str:
    """
    Push a model or a pipeline, ours or a stock one with a scaled U-Net, and return the URL of the commit.

    Args:
        repo_id: `user/name`; the repository is created if it does not exist.
        create_pr: open a pull request instead of writing to the branch.
        revision: the branch, which is created if it does not exist; `main` by default.
        subfolder: push into this folder of the repository, without a model card.
        card: more facts for the model card: [`CardFacts`], or a dict of its fields. Without `training`, the facts and
            the last sample grid of a training run are added if the model was loaded from its folder.
        save_options: options of `save_pretrained`: `variant`, `max_shard_size`, `safe_serialization`.

    ```python
    push_to_hub(pipe, "user/my-model", card={"training_data": "CIFAR-10", "samples": grid})
    ```
    """
    card = _add_training_facts(model_or_pipeline, CardFacts.parse(card))
    load_options = {"revision": revision, "variant": save_options.get("variant")}
    load_options = {name: value for name, value in load_options.items() if value}

    def write_card(folder: str, repo_id: str, previous: str | None):
        if subfolder is None:
            _write_card(make_card(model_or_pipeline, repo_id, card, previous, load_options), card, folder)

    return _push(
        repo_id,
        lambda folder: model_or_pipeline.save_pretrained(folder, **save_options),
        write_card,
        private,
        token,
        revision=revision,
        commit_message=commit_message or f"Upload {type(model_or_pipeline).__name__}",
        create_pr=create_pr,
        path_in_repo=subfolder,
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
    Push the files of `save_adapter`, and return the URL of the commit.

    Args:
        base_model: the repository of the base model; by default the one that the pipeline was loaded from.

    See [`push_to_hub`] for the other arguments.

    ```python
    push_adapter(pipe, "user/my-adapter", base_model="some/sd", card={"training_data": "my photographs"})
    ```
    """
    card = CardFacts.parse(card)
    source = pipe.config.get("_name_or_path")
    if base_model is None and (source is None or os.path.exists(source)):
        raise UserError(
            "pass base_model, the repository of the base model on the Hub: this pipeline was loaded from "
            f"{source or 'no repository'}"
        )
    base_model = base_model or source
    check_repo_id("base_model", base_model)

    def write_card(folder: str, repo_id: str, previous: str | None):
        _write_card(make_adapter_card(pipe, base_model, repo_id, card, previous, revision), card, folder)

    return _push(
        repo_id,
        lambda folder: save_adapter(pipe, folder),
        write_card,
        private,
        token,
        revision=revision,
        commit_message=commit_message or f"Upload an adapter for {base_model}",
        create_pr=create_pr,
    )


def _push(
    repo_id: str,
    save: Callable[[str], None],
    write_card: Callable[[str, str, str | None], None],
    private: bool | None,
    token: str | None,
    revision: str | None,
    **upload_options,
) -> str:
    """Upload the files that `save` and `write_card(folder, repo_id, previous)` write into a folder."""
    api = HfApi(token=token)
    with hub_errors(repo_id, revision), tempfile.TemporaryDirectory() as folder:
        # Everything that can fail locally comes before the repository is created, including a first card.
        save(folder)
        write_card(folder, repo_id, None)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        write_card(folder, repo_id, _card_on_hub(repo_id, token, revision))
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, **upload_options))


def create_repository(repo_id: str, private: bool):
    """Create a repository unless it exists, and check that files can be written to it."""
    api = HfApi()
    with hub_errors(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        # `create_repo` also returns if the repository exists but belongs to somebody else.
        api.auth_check(repo_id, write=True)


def write_model_card(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    folder: str | os.PathLike,
    repo_id: str,
    facts: CardFacts | None = None,
    token: str | None = None,
):
    """Write the model card and the picture of samples into a folder that will be uploaded."""
    facts = _add_training_facts(model_or_pipeline, facts or CardFacts())
    previous = _card_on_hub(repo_id, token, revision=None)
    _write_card(make_card(model_or_pipeline, repo_id, facts, previous), facts, folder)


def _add_training_facts(model_or_pipeline: ModelMixin | DiffusionPipeline, facts: CardFacts) -> CardFacts:
    """Add the facts and samples in the folder that a training run wrote, unless there are facts about training."""
    folder = model_or_pipeline.config.get("_name_or_path")
    if facts.training is not None or folder is None or not os.path.isdir(folder):
        return facts
    found = training_facts(read_json(folder, "settings.json") or {})
    if found:
        found["samples"] = last_samples(folder)
    return CardFacts(**{**found, **{name: value for name, value in vars(facts).items() if value is not None}})


def _card_on_hub(repo_id: str, token: str | None, revision: str | None) -> str | None:
    file = fetch_file(repo_id, "README.md", token=token, revision=revision)
    return None if file is None else Path(file).read_text(encoding="utf-8")


def _write_card(card: ModelCard, facts: CardFacts, folder: str | os.PathLike):
    card.save(os.path.join(folder, "README.md"))
    if facts.samples is not None:
        facts.samples.save(os.path.join(folder, SAMPLES))
