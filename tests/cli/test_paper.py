"""`scalelong paper`."""

import json
import re

import pytest

from scalelong_diffusers.paper import figures
from scalelong_diffusers.paper.figures import FIGURES


@pytest.fixture(autouse=True)
def no_signal_handlers(monkeypatch):
    monkeypatch.setattr("scalelong_diffusers.cli.paper.exit_on_signals", lambda: None)


@pytest.fixture
def paper(scalelong, tmp_path):
    """Run `scalelong paper` in a new folder and return what it prints."""

    def run(*words):
        code, printed, _ = scalelong("paper", *words, "--output_dir", tmp_path / "out")
        assert code == 0
        return printed

    return run


def test_lists_all_figures_with_their_progress(paper):
    lines = paper().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(FIGURES)
    assert re.match(r"lemma3\.2 +0 of 3 ", lines[2])
    rows = json.loads(paper("--json", "--seeds", "2"))
    assert rows[1] == {"figure": "lemma3.2", "title": FIGURES["lemma3.2"].title, "finished": 0, "planned": 2}


def test_runs_only_what_is_missing(paper, tmp_path, monkeypatch):
    file = tmp_path / "out" / "quick" / "inputs.jsonl"
    paper("lemma3.2", "--quick")
    first = file.read_text()
    assert len(first.splitlines()) == 1
    printed = paper("lemma3.2", "lemma3.2", "--quick", "--seeds", "2")
    assert file.read_text().startswith(first)
    assert len(file.read_text().splitlines()) == 2
    assert "| uniform | 784 | 2 |" in printed
    monkeypatch.setattr(figures, "run_figure", None)  # a report runs nothing
    assert paper("lemma3.2", "--quick", "--report") == printed
    lines = json.loads(paper("lemma3.2", "--quick", "--report", "--seeds", "2", "--json"))["lemma3.2"]
    assert [line["run"]["seed"] for line in lines] == [0, 1]


def test_continues_after_a_killed_process(paper, tmp_path):
    """The process was killed while it wrote a line."""
    file = tmp_path / "out" / "quick" / "inputs.jsonl"
    paper("lemma3.2", "--quick", "--seeds", "2")
    whole = file.read_text()
    file.write_text(whole[:-20])
    paper("lemma3.2", "--quick", "--seeds", "2")
    assert file.read_text() == whole


def test_report_of_nothing_says_so(paper):
    assert "(no finished runs)" in paper("theorem3.4", "--report")


def test_draws_charts_for_light_and_dark_pages(paper, tmp_path, monkeypatch):
    monkeypatch.setattr("scalelong_diffusers.paper.input_tables.DATASETS", ("uniform", "colored shapes"))
    paper("fig3b", "--quick")
    for page in ("light", "dark"):
        svg = (tmp_path / "out" / "quick" / f"fig3b-{page}.svg").read_text()
        assert svg.count("<polyline") == 2
        assert "|eps|" in svg
        assert not re.search(r"(href|src|url)", svg)


def test_names_a_folder_that_it_cannot_write_and_a_file_that_it_cannot_read(error_of, tmp_path):
    (tmp_path / "file").touch()
    message = f"cannot write to --output_dir {tmp_path / 'file' / 'quick'}"
    assert message in error_of("paper", "lemma3.2", "--quick", "--output_dir", tmp_path / "file")
    for content in ("no JSON\n", '{"run": {"dataset": "uniform", "size": 3}}\n', "[]\n", "{}\n"):
        (tmp_path / "inputs.jsonl").write_text(content)
        line = error_of("paper", "fig3a", "--output_dir", tmp_path)
        assert f"{tmp_path / 'inputs.jsonl'} cannot be read as result lines" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig3c2"], "unknown figure 'fig3c2' (did you mean 'fig3"),
        (["fig3a", "lema3.2"], "unknown figure 'lema3.2' (did you mean 'lemma3.2'?); accepted: all, theorem3.1"),
        (["zebra"], "unknown figure 'zebra'; accepted: all"),
        (["fig3a", "--seeds", "0"], "--seeds must be an integer, at least 1 and at most 100, got 0"),
        (["fig3a", "--seeds", "two"], "argument --seeds: invalid int value: 'two'"),
        (["fig3a", "--jobs", "-1"], "--jobs must be an integer, at least 1 and at most 1,000, got -1"),
        (["fig3a", "--quik"], "unknown argument '--quik' (did you mean '--quick'?)"),
        (["fig3a", "--data", "/no/such/folder"], "folder /no/such/folder does not exist: run apt-get install"),
        (["fig3a", "--output_dir", ""], "--output_dir must be a string that is not empty"),
    ],
)
def test_rejects_bad_input_with_one_line(error_of, tmp_path, words, message):
    folder = [] if "--output_dir" in words else ["--output_dir", tmp_path]
    assert message in error_of("paper", *words, *folder)
