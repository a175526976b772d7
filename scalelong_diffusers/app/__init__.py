"""The app in the browser: sample with and without skip scaling, train a small model, and diagnose one (gradio)."""

import os


# gradio reads this when it is imported: it would report each start of the app, and look for newer versions of itself.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from scalelong_diffusers.app.app import App


__all__ = ["App"]
