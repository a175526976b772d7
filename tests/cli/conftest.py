"""The command in this process."""

import pytest


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
