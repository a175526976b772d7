"""The page of the app and its server."""

import gradio as gr

from scalelong_diffusers.app.comparison import Comparison
from scalelong_diffusers.app.diagnose_tab import diagnose_tab
from scalelong_diffusers.app.jobs import Job
from scalelong_diffusers.app.markup import STYLE
from scalelong_diffusers.app.sample_tab import sample_tab
from scalelong_diffusers.app.train_tab import train_tab
from scalelong_diffusers.errors import UserError


_TITLE = "scalelong-diffusers"
# The default fonts come from Google, and the default notes are too pale to read.
_THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
    body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300",
    block_title_text_color="*neutral_800", block_title_text_color_dark="*neutral_100",
)  # fmt: skip


class App:
    """
    The app, which `launch` starts.

    Args:
        model: a pipeline to start with: a folder or an id on the Hub.
        device: device of the pipeline, by default a GPU if one is available.
        is_public: whether strangers use the app, as on a Hugging Face Space: they can sample this model, but neither
            load others nor start processes.

    ```python
    App("runs/flowers").launch()
    ```
    """

    def __init__(self, model: str | None = None, device: str | None = None, is_public: bool = False):
        self.device = device
        self.is_public = is_public
        self.comparison: Comparison | None = None
        if model is not None:
            self.load(model)
        self.training, self.diagnosis = Job("training"), Job("diagnosis")
        with gr.Blocks(title=_TITLE, analytics_enabled=False) as self.page:
            gr.Markdown(f"# {_TITLE}")
            with gr.Tab("Sample"):
                sample_tab(self)
            if not is_public:
                with gr.Tab("Train"):
                    train_tab(self)
                with gr.Tab("Diagnose"):
                    diagnose_tab(self)

    def load(self, source: str):
        """Replace the pipeline."""
        if not source.strip():
            raise UserError("enter a pipeline folder or an id on the Hub")
        self.comparison = Comparison(source.strip(), self.device)

    @property
    def loaded(self) -> Comparison:
        if self.comparison is None:
            raise UserError("no model is loaded: enter a pipeline folder or an id on the Hub, and press Load")
        return self.comparison

    def launch(self, server_name: str | None = None, server_port: int | None = None) -> str:
        """Start the server in the background and return its address. gradio chooses what is None."""
        try:
            _, url, _ = self.page.queue().launch(
                server_name=server_name, server_port=server_port, share=False, quiet=True, prevent_thread_lock=True,
                ssr_mode=False, footer_links=[], theme=_THEME, css=STYLE,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"server_port {server_port} cannot be used: {error}") from error
        return url

    def close(self):
        """Stop the server and all processes."""
        self.training.close()
        self.diagnosis.close()
        self.page.close(verbose=False)
