"""`make demo` with few steps: it goes on after an interrupt, and its page is opened in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright


pytestmark = pytest.mark.slow

STEPS = 24
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's folder; it was interrupted in its first training, and started again."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(BENCHMARKS / "demo.py"), "--steps", str(STEPS), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = folder / "none" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)  # as the terminal sends it
    errors = first.communicate(timeout=60)[1]
    assert first.returncode == 130
    assert "Traceback" not in errors
    assert "demo: interrupted; the same command goes on" in errors
    assert not (folder / "index.html").exists()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    # The rest of one training and the whole of the other, each with a bar that says what time is left, and both
    # samplings, too.
    assert again.stdout.count("training the model") == 2
    bars = re.split(r"(?=/images: +0%)", again.stderr)
    assert len(bars) == 3
    for bar, of in zip(bars, ("training", "training and sampling", "sampling")):
        assert ("steps [" in bar) == ("training" in of), bar
        if "training" in of:
            assert re.search(rf"\b{STEPS}/{STEPS} steps \[[0-9:]+<00:00\]", bar), bar
        if "sampling" in of:
            assert re.search(r"/images: 100%.* 120/120 images \[[0-9:]+<00:00\]", bar), bar
    return folder


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, demo):
    """`opened(width=…, color_scheme=…)` is the page, and what it asked for and complained of."""
    contexts = []

    def run(width=1200, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.asked_for, page.complaints = [], []
        page.on("request", lambda request: page.asked_for.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto((demo / "index.html").as_uri())
        return page

    yield run
    for context in contexts:
        context.close()


def test_how_many_steps(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    assert demo.parse_args([]).steps == demo.STEPS
    assert demo.parse_args(["--quick"]).steps == demo.QUICK_STEPS
    assert demo.parse_args(["--steps", "70"]).steps == 70
    # Neither takes the place of the other.
    folders = {demo.parse_args(words).folder for words in ([], ["--quick"], ["--steps", "70"])}
    assert len(folders) == 3
    with pytest.raises(SystemExit) as refused:
        demo.parse_args(["--steps", "0"])
    assert refused.value.code == 2
    assert "--steps must be at least 10, got 0" in capsys.readouterr().err


def test_what_is_not_a_run_is_not_removed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "thesis.txt").write_text("years")
    with pytest.raises(SystemExit, match="holds something else: give another --folder"):
        demo.train(tmp_path / "none", "none", "without scaling", 3)
    assert (tmp_path / "none" / "thesis.txt").read_text() == "years"


def test_a_run_of_other_settings_is_not_removed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    folder = tmp_path / "cs"
    (folder / "checkpoint-20000").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({**demo.TRAINING, "max_train_steps": 20000}))
    with pytest.raises(SystemExit, match="holds something else: give another --folder, or delete it"):
        demo.train(folder, "cs", "with CS", 3000)
    assert (folder / "checkpoint-20000").is_dir()


def test_an_interrupted_demo_goes_on_with_each_step_once(demo):
    for method in ("none", "cs"):
        lines = [json.loads(line) for line in (demo / method / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [10, 20, STEPS]
    assert json.loads((demo / "none" / "settings.json").read_text())["resume_from_checkpoint"] == "latest"
    assert json.loads((demo / "cs" / "settings.json").read_text())["resume_from_checkpoint"] is None


def test_the_page_fetches_nothing_and_complains_of_nothing(opened, demo):
    page = opened()
    assert page.complaints == []
    assert [url for url in page.asked_for if not url.startswith("data:")] == [(demo / "index.html").as_uri()]


def test_pictures_are_there_and_say_what_they_show(opened):
    page = opened()
    pictures = page.evaluate("[...document.images].map(image => [image.naturalWidth, image.alt])")
    assert len(pictures) == 60
    assert all(width == 16 for width, _ in pictures)
    assert all(alt.startswith("asked for ") and ", shows " in alt for _, alt in pictures)
    wrong = [alt for _, alt in pictures if len(set(alt.removeprefix("asked for ").split(", shows "))) == 2]
    framed = page.evaluate("[...document.querySelectorAll('img.wrong')].map(image => image.alt)")
    assert framed == wrong
    assert wrong
    # Each stands in the column of the colour and the row of the shape that it was asked for.
    asked = page.evaluate(
        "[...document.querySelectorAll('.images')].map(table => {"
        "  const heads = [...table.tHead.rows[0].cells].slice(1).map(cell => cell.innerText);"
        "  return [...table.tBodies[0].rows].flatMap(row => heads.map((colour, k) =>"
        "    [colour + ' ' + row.cells[0].innerText, row.cells[k + 1].querySelector('img').alt]));"
        "})"
    )
    assert [len(table) for table in asked] == [30, 30]
    assert all(alt.startswith(f"asked for {name}, ") for table in asked for name, alt in table)
    curves = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.querySelectorAll('polyline').length)")
    assert curves == [2, 2]
    assert page.locator("svg[role=img][aria-label]").count() == 2


def test_it_fits_a_phone(opened):
    page = opened(width=390, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # What is wider scrolls by itself, and can be reached by the keyboard.
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => [e.tagName, e.tabIndex])"
    )
    assert {name for name, _ in wide} == {"DIV", "PRE"}
    assert all(index == 0 for _, index in wide)
    # Numbers in the charts can be read, and none is cut off.
    heights = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10
    left = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().left)")
    assert min(left) >= 0


CONTRASTS = """
() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const paper = luminance(numbers(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('h1, h2, h3, p, figcaption, caption, th, td, code, svg text')].map(element => {
    const style = getComputedStyle(element);
    const ink = luminance(numbers(element instanceof SVGElement ? style.fill : style.color));
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
  });
}
"""


@pytest.mark.parametrize("media", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"media": "print"}])
def test_it_can_be_read(opened, media):
    page = opened()
    page.emulate_media(**media)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert min(contrasts) >= 4.5


def test_dark_is_dark(opened):
    colours = []
    for scheme in ("light", "dark"):
        page = opened(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]


def test_its_lines_of_code_load_the_result(opened, demo, in_fresh_process):
    code = opened().locator("pre code").inner_text()
    in_fresh_process(f"import os\nos.chdir({str(demo)!r})\n{code}")
    assert (demo / "image.png").stat().st_size > 0
