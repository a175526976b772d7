"""`scalelong app` opens an app in the browser."""

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Event

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.trainings import exit_on_signals
from scalelong_diffusers.options import add_options, build_config, check_options, option
from scalelong_diffusers.terminal import print_lines


@dataclass(frozen=True)
class AppConfig:
    """Where the server listens, and the device of the model."""

    model: str | None = None
    server_name: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 lets everybody in the network use your files", metavar="ADDRESS"
    )
    server_port: int = option(7860, "port to listen on", at_least=1, at_most=65_535)
    device: str | None = option(None, "device, such as cuda:1 (default: a GPU if one is available)")

    def __post_init__(self):
        check_options(self)


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "app",
        help="open an app in the browser",
        description=(
            "Sample a model with and without skip scaling, train a small model, and diagnose models in the browser. "
            "The app needs gradio: pip install 'scalelong-diffusers[app]'."
        ),
    )
    parser.add_argument("model", nargs="?", help="a pipeline: a local folder or an id on the Hub")
    add_options(parser, AppConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = build_config(AppConfig, vars(arguments))
    if find_spec("gradio") is None:
        raise UserError("the app needs gradio: pip install 'scalelong-diffusers[app]'")
    from scalelong_diffusers.app import App  # imports gradio, which is slow

    exit_on_signals()
    app = App(config.model, config.device)
    try:
        print_lines(f"open {app.launch(config.server_name, config.server_port)} (Ctrl-C stops the app)")
        Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        app.close()
