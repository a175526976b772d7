"""Names and texts of others reach the terminal only as plain characters."""

import ast
import io
import json
import os

import pytest

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.terminal import print_lines, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cat, \u00fcber, \u732b, \U0001f408", "a cat, \u00fcber, \u732b, \U0001f408"),
        ("\x1b]0;title\x07\x1b[31mred", "\\u001b]0;title\\u0007\\u001b[31mred"),
        ("\x9b2J\x7f\r\n\t", "\\u009b2J\\u007f\\u000d\\u000a\\u0009"),
        ("gnp.\u202etac", "gnp.\\u202etac"),  # would show as cat.png
    ],
)
def test_escapes_what_a_terminal_acts_on(text, shown):
    assert printable(text) == shown
    output = io.StringIO()
    print_lines(text, "next", file=output)
    assert output.getvalue() == f"{shown}\nnext\n"
    assert str(UserError(f"class {text.strip()}")) == f"class {printable(text.strip())}"


def test_prints_file_names_that_are_not_utf8():
    assert printable(os.fsdecode(b"caf\xe9")).isascii()


def test_json_stays_valid():
    assert json.loads(printable(json.dumps({"name": "a\x7f\x1b\u202e"}))) == {"name": "a\x7f\x1b\u202e"}


def test_errors_are_one_line():
    assert str(UserError("first\n  second\r\nthird ")) == "first second third"


def test_all_modules_print_with_print_lines(project_root):
    others = {"print", "tqdm.write", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc"}
    folders = [project_root / name for name in ("scalelong_diffusers", "pipelines", "train")]
    calls = [
        (file.name, ast.unparse(node.func))
        for folder in folders
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    found = {(file, call) for file, call in calls if call in others or call.endswith(("accelerator.print", ").print"))}
    assert found == {("terminal.py", "tqdm.write")}
