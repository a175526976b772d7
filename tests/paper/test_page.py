"""docs/paper.md shows the committed result lines, and has a verdict exactly for what was run in full."""

import re

import pytest

from scalelong_diffusers.paper.figures import FIGURES, tables


@pytest.fixture
def page(project_root):
    return (project_root / "docs" / "paper.md").read_text()


@pytest.fixture
def verdicts(page):
    """The verdicts by figure."""
    section = page.split("## Verdicts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \[?([\w.]+)\]?(?:\([^)]*\))? \|[^|]*\| ([^|]*) \|$", section, re.MULTILINE)
    return {name: verdict for name, verdict in rows if name in FIGURES}


def test_every_figure_has_a_verdict(verdicts):
    assert list(verdicts) == list(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_page_matches_the_finished_runs(name, page, verdicts, project_root):
    folder = project_root / "docs" / "paper"
    figure = FIGURES[name]
    results = figure.experiment.results(folder)
    is_complete = all(run in results for run in figure.planned(quick=False))
    assert (verdicts[name] == "Not run in full yet.") is not is_complete
    for table in tables(name, folder, quick=False).split("\n\n") if is_complete else ():
        assert table in page
    if is_complete and figure.panels is not None:
        for shade in ("light", "dark"):
            assert (folder / f"{name}-{shade}.svg").exists()
            assert f"paper/{name}-{shade}.svg" in page
