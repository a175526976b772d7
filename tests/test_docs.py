"""Runnable code blocks in README and docs print what the page shows, links lead somewhere, and wording is checked."""

import json
import re
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "integrations/comfyui", "notebooks")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md")))]
BLOCK = re.compile(r"<!-- runnable( with the Hub)? -->\n```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())]
HUB_BLOCKS = [(page, code, printed) for page, hub, code, printed in BLOCKS if hub]
LOCAL_BLOCKS = [(page, code, printed) for page, hub, code, printed in BLOCKS if not hub]

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


@pytest.mark.slow
def test_runnable_blocks_print_what_the_page_shows(in_fresh_process, tmp_path, subtests):
    (tmp_path / "blocks.json").write_text(json.dumps([code for _, code, _ in LOCAL_BLOCKS]))
    in_fresh_process(RUNNER, OMP_NUM_THREADS="1")
    results = json.loads((tmp_path / "results.json").read_text())
    for (page, _, expected), (printed, error) in zip(LOCAL_BLOCKS, results):
        with subtests.test(page):
            assert not error, error
            assert expected is None or printed == expected


@pytest.mark.slow
def test_runnable_blocks_with_the_hub_print_what_the_page_shows(hub):
    for _, code, printed in HUB_BLOCKS:
        assert hub(code.replace("user/", "owner/")).stdout == printed


def test_readme_and_docs_have_runnable_code():
    assert any(page == "README.md" and printed for page, _, printed in LOCAL_BLOCKS)
    assert len(LOCAL_BLOCKS) >= 6
    assert HUB_BLOCKS


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
