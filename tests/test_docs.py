"""The code in README and docs that is marked as runnable runs, and prints what is written below it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- runnable( with the Hub)? -->\n```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())]


def blocks(needs_hub: bool):
    chosen = [(code, printed) for _, hub, code, printed in BLOCKS if bool(hub) == needs_hub]
    ids = [page for page, hub, *_ in BLOCKS if bool(hub) == needs_hub]
    return pytest.mark.parametrize(("code", "printed"), chosen, ids=ids)


@blocks(needs_hub=False)
def test_runnable_code_prints_what_the_page_says(code, printed, tmp_path):
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if printed is not None:
        assert result.stdout == printed


@blocks(needs_hub=True)
def test_code_that_needs_the_hub_runs_against_the_one_on_loopback(hub, code, printed):
    assert hub(code.replace("user/", "owner/")).stdout == printed


def test_the_readme_has_runnable_code():
    assert any(page == "README.md" and printed for page, *_, printed in BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readmes_test_command_is_that_of_ci():
    assert "\nmake test\n" in (ROOT / "README.md").read_text()
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()
