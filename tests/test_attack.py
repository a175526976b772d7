"""The attack on the package (`make attack`) finds planted failures, and nothing in what is right."""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from scalelong_diffusers import UserError
from scalelong_diffusers.files import atomic_write, remove_leftovers
from scalelong_diffusers.options import options_of
from scalelong_diffusers.train.train_class_conditional import ClassConditionalConfig


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def modules():
    """Return a function that imports a module of the attack."""
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.startswith("attack")]:
        del sys.modules[name]


@pytest.fixture
def failures(modules, tmp_path):
    """`failures(attack, numbers)`: the reasons why cases fail that run in another process."""
    (tmp_path / "parts" / "planted").mkdir(parents=True)
    (tmp_path / "parts" / "planted" / "file.bin").write_bytes(bytes(range(100)))

    def run(attack, numbers=(0,)) -> list[str]:
        def make_case(number):
            return modules("attack_sandbox").Case(
                "planted", 0, number, tmp_path / "parts", tmp_path / f"case-{number}"
            )

        tally = modules("attack").attack_for(60, attack, make_case, [numbers])
        assert tally.tried >= len(numbers)
        return list(tally.failed.values())

    return run


def fail_with(error):
    raise error


LOADERS = {
    "works": (lambda damage: damage.file.read_bytes(), None),
    "a message": (lambda damage: fail_with(UserError("it is damaged")), None),
    "a message of two lines": (lambda damage: fail_with(UserError("it is\ndamaged")), None),  # printed as one
    "a bug": (lambda damage: fail_with(KeyError("a slip")), "KeyError: 'a slip'"),
    "an escape sequence": (lambda damage: fail_with(UserError("\x1b[31mred")), None),  # printed escaped
    "no message": (lambda damage: fail_with(UserError("")), "the message of the error is empty"),
    "a hang": (lambda damage: time.sleep(10), "it took more than 0.5 seconds"),
    "memory": (lambda damage: bytearray(2**35), "MemoryError"),
    "a crash": (lambda damage: os.kill(os.getpid(), signal.SIGKILL), "the process ended with exit code -9"),
    "a program": (lambda damage: subprocess.run(["true"]), "subprocess.Popen"),
    "code": (lambda damage: exec(compile("1", damage.folder / "code.py", "exec")), "exec"),
    "a file outside": (lambda damage: Path("../../../file").touch(), "/file, which is outside of the named folders"),
    "a folder outside": (lambda damage: Path("../../../up").mkdir(), "/up, which is outside of the named folders"),
    "a lost file": (lambda damage: os.remove("../../../file"), "/file, which is outside of the named folders"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_flips_find(modules, failures, monkeypatch, tmp_path, name):
    load, expected = LOADERS[name]
    flips = modules("attack_flips")
    monkeypatch.setattr(flips, "SECONDS", 0.5)
    found = failures(lambda case: flips.change_file(case, flips.Target("planted", ("*",), load), flips.damaged))
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]
    assert all("planted/file.bin: " in problem for problem in found), "it says what was damaged"
    assert not {"file", "up"}.intersection(os.listdir(tmp_path.parent)), "the attack prevents it"


def test_damage_changes_the_content(modules):
    flips, sandbox = modules("attack_flips"), modules("attack_sandbox")
    content = bytes(range(1, 101))
    made = [flips.damaged(content, sandbox.Case("flips", 1, k, Path(), Path()).random) for k in range(50)]
    again = [flips.damaged(content, sandbox.Case("flips", 1, k, Path(), Path()).random) for k in range(50)]
    assert made == again, "a case depends only on its seed and number"
    assert all(after != content for after, _ in made)
    assert len({after for after, _ in made}) > 45


def write_all(arguments, prepare=remove_leftovers, finish=lambda folder: None):
    """Write the missing ones of ten files, in the first process. Others would remove its temporary files."""
    if os.environ.get("RANK", "0") != "0":
        return
    folder = Path(arguments[-1])
    try:
        folder.mkdir(exist_ok=True)
        prepare(folder)
        for k in range(10):
            if not (folder / f"{k}.png").exists():
                atomic_write(folder / f"{k}.png", lambda partial, k=k: partial.write_bytes(b"%d" % k), durable=False)
        finish(folder)
    except (OSError, KeyboardInterrupt) as error:
        print(f"command: {type(error).__name__} {error}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)


def refuse_old_folders(arguments):
    if Path(arguments[-1], "0.png").exists():
        print("command: this folder is not empty", file=sys.stderr)
        sys.exit(2)
    write_all(arguments)


def count_starts(folder):
    with open(folder / "0.png", "ab") as file:
        file.write(b"+")


MAINS = {
    "nothing": (write_all, None),
    "leftovers": (partial(write_all, prepare=lambda folder: None), "left over: ['.scalelong-partial-"),
    "lost files": (
        partial(write_all, finish=lambda folder: (folder / "notes.txt").unlink(True)),
        "the user's file not",
    ),
    "other content": (partial(write_all, finish=count_starts), "0.png differs from an uninterrupted run"),
    "a refusal": (refuse_old_folders, "it cannot be started again: 'command: this folder is not empty"),
}


@pytest.mark.parametrize("name", MAINS)
def test_kills_find(modules, failures, monkeypatch, name):
    main, expected = MAINS[name]
    kills, commands = modules("attack_kills"), modules("attack_commands")
    planted = {"planted-command": commands.Attacked(main, {}, has_workers=False)}
    monkeypatch.setattr(kills, "COMMANDS", planted)
    monkeypatch.setattr(commands, "COMMANDS", planted)
    found = failures(kills.attack, range(6))
    assert bool(found) == (expected is not None), found
    assert expected is None or any(expected in problem for problem in found), found


def test_inputs_find(modules, failures, monkeypatch):
    inputs = modules("attack_inputs")
    monkeypatch.setattr(inputs, "flags_in_help", lambda name: ["--flag"])

    def found(main) -> list[str]:
        monkeypatch.setattr(inputs, "_COMMANDS", {"planted": (main, {})})
        return failures(inputs.pass_flags)

    def refuse(arguments, message="command: no such flag"):
        print(message, file=sys.stderr)
        return 2

    assert found(lambda arguments: 0) == found(refuse) == []
    assert "without a message of one line" in found(partial(refuse, message="command: one\ntwo"))[0]
    assert "control character" in found(partial(refuse, message="command: \x07"))[0]
    assert "exit code 3" in found(lambda arguments: 3)[0]
    assert "KeyError" in found(lambda arguments: {}["flag"])[0]
    assert "an escape sequence reaches the terminal" in found(lambda arguments: print(inputs.ESCAPE))[0]


def test_all_scripts_and_configs_are_attacked(modules, project_root):
    """A new script must be added to `attack_commands.py`."""
    commands = modules("attack_commands")
    scripts = {file.stem for file in (project_root / "train").glob("[!_]*.py")}
    assert scripts == {value.__name__.split(".")[-1] for value in vars(commands).values() if "train." in repr(value)}
    configs = {config.__name__ for config in modules("attack_inputs").RUN_CONFIGS}
    assert configs >= {"TrainingConfig", "ClassConditionalConfig", "TextToImageConfig", "FineTuningConfig"}


def test_inputs_cover_all_flags(modules):
    inputs = modules("attack_inputs")
    flags = {f"--{flag}" for flag, _, _ in options_of(ClassConditionalConfig)} - {"--compile"}
    assert flags <= set(inputs.flags_in_help("class_conditional"))
    assert {"--num_images", "--scheduler", "--seed"} <= set(inputs.flags_in_help("sample"))


def test_odd_values(modules):
    inputs, sandbox = modules("attack_inputs"), modules("attack_sandbox")
    random = sandbox.Case("inputs", 0, 0, Path(), Path()).random
    words = {inputs.odd_text(random) for _ in range(2000)}
    assert {"", "0", "nan", "inf", "-1", "\udcff"} <= words
    assert any(len(word) > 300 for word in words)
    for hint, kinds in ((int, (int,)), (float | None, (int, float)), (list[str], (list,)), (dict[str, str], (dict,))):
        assert all(isinstance(inputs.odd_of_type(hint, random), kinds) for _ in range(50))
    assert inputs.odd_of_type(Path, random) is inputs.NOTHING
    assert list(itertools.islice(inputs._places({"a": [1]}), 3)) == [({"a": [1]}, "a"), ([1], 0)]
