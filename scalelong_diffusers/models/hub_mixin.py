"""`HubMixin`: what our models and pipelines add to `push_to_hub`."""

import scalelong_diffusers


class HubMixin:
    """Make a diffusers model or pipeline push a model card that describes its skip scaling."""

    # `scalelong_diffusers.hub` builds on models and pipelines, so it is looked up through the package when it is needed.

    def push_to_hub(self, repo_id: str, *args, **options) -> str:
        """Push to the Hub. See [`scalelong_diffusers.push_to_hub`] for the options."""
        return scalelong_diffusers.push_to_hub(self, repo_id, *args, **options)

    def _upload_folder(self, working_dir, repo_id, token=None, **options):
        # `save_pretrained(push_to_hub=True)` of diffusers ends here, after it wrote its own card.
        scalelong_diffusers.write_model_card(self, working_dir, repo_id, token=token)
        return super()._upload_folder(working_dir, repo_id, token=token, **options)
