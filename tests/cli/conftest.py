"""The command in this process."""

import pytest

from scalelong_diffusers.cli import main


@pytest.fixture
def scalelong(capsys):
    """Run a command and return its exit code, stdout and stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def error_of(scalelong):
    """Run a command that fails and return its one-line error."""

    def run(*arguments):
        code, printed, errors = scalelong(*arguments)
        assert (code, printed) == (2, ""), errors
        assert "Traceback" not in errors
        (line,) = [line for line in errors.splitlines() if line.startswith("scalelong")]
        assert errors.endswith(f"{line}\n")
        return line

    return run
