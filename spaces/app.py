"""A Hugging Face Space that samples one model with and without skip scaling. The variable MODEL names its pipeline."""

import os
from threading import Event

from scalelong_diffusers.app import App


App(os.environ["MODEL"], is_public=True).launch()
Event().wait()
