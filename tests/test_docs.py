"""Runnable code blocks in README and docs print what the page shows, links lead somewhere, and wording is checked."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import runnable_blocks

import scalelong_diffusers


ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "integrations/comfyui", "notebooks")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md")))]
BLOCKS = [block for page in PAGES for block in runnable_blocks(page)]
HUB_BLOCKS = [(page, code, printed) for page, needs_hub, code, printed in BLOCKS if needs_hub]
LOCAL_BLOCKS = [(page, code, printed) for page, needs_hub, code, printed in BLOCKS if not needs_hub]

# Runs all blocks in one process, each in its own folder and namespace.
RUNNER = """
import contextlib, io, json, os, sys, traceback
home, results = os.getcwd(), []
for number, code in enumerate(json.load(open("blocks.json"))):
    os.mkdir(f"block-{number}")
    os.chdir(f"block-{number}")
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, f"block {number}", "exec"), {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    results.append([printed.getvalue(), error])
    os.chdir(home)
json.dump(results, open("results.json", "w"))
"""


def check_output(blocks, run, folder, subtests):
    (folder / "blocks.json").write_text(json.dumps([code for _, code, _ in blocks]))
    run(RUNNER, OMP_NUM_THREADS="1")
    results = json.loads((folder / "results.json").read_text())
    for (page, _, expected), (printed, error) in zip(blocks, results, strict=True):
        with subtests.test(page):
            assert not error, error
            assert expected is None or printed == expected


@pytest.mark.slow
def test_runnable_blocks_print_what_the_page_shows(in_fresh_process, tmp_path, subtests):
    check_output(LOCAL_BLOCKS, in_fresh_process, tmp_path, subtests)


@pytest.mark.slow
def test_runnable_blocks_with_the_hub_print_what_the_page_shows(hub, tmp_path, subtests):
    blocks = [(page, code.replace("user/", "owner/"), printed) for page, code, printed in HUB_BLOCKS]
    check_output(blocks, hub, tmp_path, subtests)


def test_readme_and_docs_have_runnable_code():
    assert any(page == "README.md" and printed for page, _, printed in LOCAL_BLOCKS)
    assert len(LOCAL_BLOCKS) >= 6
    assert HUB_BLOCKS


def test_public_names_have_a_docstring_and_an_example_that_runs():
    examples = "\n".join(block.code for block in BLOCKS)
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in set(scalelong_diffusers.__all__) - {"__version__"}:
        documented = getattr(scalelong_diffusers, name)
        assert (documented.__doc__ or "").strip(), name
        assert re.search(rf"\b{name}\b", examples), f"{name} is in no example that runs"
        assert f".{name}\n" in reference, f"{name} is missing in docs/api.md"


@pytest.mark.slow
def test_documentation_site_builds_without_warnings(project_root, tmp_path):
    pytest.importorskip("mkdocs", reason="make docs-check installs it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(build, cwd=project_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The README is the home page, and the browser draws formulas without a script.
    assert 'href="training.html"' in (tmp_path / "index.html").read_text()
    assert "<math" in (tmp_path / "how_it_works.html").read_text()


def test_all_code_blocks_parse():
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(code, page.name, "exec")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_ci_runs_the_test_command_of_the_readme():
    assert "\nmake test\n" in (ROOT / "README.md").read_text()
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_wording_check_finds_phrases_and_docstrings():
    findings = runpy.run_path(str(ROOT / ".ci" / "wording.py"))["findings"]
    text = "# This can" + ' not be.\ndef run():\n    """The colo' + 'ur."""\n    cannot = "goes' + '_on"\n'
    assert [line.split(": ", 1)[0] for line in findings(Path("a.py"), text)] == ["a.py:1", "a.py:3", "a.py:2"]
    assert list(findings(Path("a.py"), '"""Return the color."""\n')) == []
    assert len(list(findings(Path("a.md"), "A run goes" + " on.\n"))) == 1
