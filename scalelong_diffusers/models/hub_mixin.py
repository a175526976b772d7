"""`HubMixin`: `push_to_hub` with a model card, for our models and pipelines."""

import scalelong_diffusers


class HubMixin:
    """Lets a diffusers model or pipeline push a model card that describes its skip scaling."""

    # `scalelong_diffusers.hub` depends on models and pipelines, so it is looked up through the package.

    def push_to_hub(self, repo_id: str, *args, **options) -> str:
        """Push to the Hub. See [`scalelong_diffusers.push_to_hub`] for the options."""
        return scalelong_diffusers.push_to_hub(self, repo_id, *args, **options)

    def _upload_folder(self, working_dir, repo_id, token=None, **options):
        # diffusers' `save_pretrained(push_to_hub=True)` calls this after it wrote its own card.
        scalelong_diffusers.write_model_card(self, working_dir, repo_id, token=token)
        return super()._upload_folder(working_dir, repo_id, token=token, **options)
