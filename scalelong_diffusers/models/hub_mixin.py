"""`HubMixin`: pushes models and pipelines to the Hub with a model card of their skip scaling."""

import scalelong_diffusers


class HubMixin:
    """Make a diffusers model or pipeline push a model card that describes its skip scaling."""

    # `scalelong_diffusers.hub` imports models and pipelines, so its functions are looked up through the package.

    def push_to_hub(self, repo_id: str, *args, **options) -> str:
        """Push to the Hub. See [`scalelong_diffusers.push_to_hub`] for the options."""
        return scalelong_diffusers.push_to_hub(self, repo_id, *args, **options)

    def _upload_folder(self, working_dir, repo_id, token=None, **options):
        # `save_pretrained(push_to_hub=True)` of diffusers calls this after it wrote its own card.
        scalelong_diffusers.write_model_card(self, working_dir, repo_id, token=token)
        return super()._upload_folder(working_dir, repo_id, token=token, **options)
