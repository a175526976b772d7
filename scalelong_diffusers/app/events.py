"""Handlers of events in the page: they show errors of the user, and follow processes."""

import html
import time
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgeneratorfunction
from pathlib import Path

import gradio as gr

from scalelong_diffusers.app.jobs import Job
from scalelong_diffusers.errors import UserError


_SECONDS_TO_READ = 20
_SECONDS_BETWEEN_LOOKS = 1.0


def shows_errors(function: Callable) -> Callable:
    """Decorate an event handler so that a `UserError` becomes a message in the page."""

    def message(error: UserError) -> gr.Error:
        return gr.Error(html.escape(str(error), quote=False), duration=_SECONDS_TO_READ, print_exception=False)

    @wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except UserError as error:
            raise message(error) from error

    @wraps(function)
    def generate(*args, **kwargs):
        try:
            yield from function(*args, **kwargs)
        except UserError as error:
            raise message(error) from error

    return generate if isgeneratorfunction(function) else call


def follow(job: Job, results: Callable[[Path], str]) -> Iterator[tuple[str, str]]:
    """Yield the state of a job and its results as HTML, until the job has ended."""
    if job.output is None:
        return
    while job.is_running:
        yield job.state(), results(job.output)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    yield "", results(job.output)  # before the error of a job that failed, which ends the handler
    yield job.state(), results(job.output)
