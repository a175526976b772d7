"""`make demo` with few steps: it resumes after an interruption, and its page works in a real browser."""

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


STEPS = 24
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CHROMIUM = shutil.which("chromium")
# One image per class and two sampling steps.
SMALL_DEMO = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import demo
demo.SAMPLES = 30
demo.SAMPLING["steps"] = 2
demo.main()
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the demo, interrupt it in its first training, run it again, and return its folder."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-c", SMALL_DEMO, "--steps", str(STEPS), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = folder / "none" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text()):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    errors = first.communicate(timeout=60)[1]
    assert first.returncode == 130
    assert "Traceback" not in errors
    assert "demo: interrupted; run the same command again to resume" in errors
    assert not (folder / "index.html").exists()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    # The rest of the first training, the second training, and both samplings, each with a progress bar.
    assert again.stdout.count("training the model") == 2
    bars = re.split(r"(?=/images: +0%)", again.stderr)
    assert len(bars) == 3
    for bar, parts in zip(bars, ("training", "training and sampling", "sampling")):
        assert ("steps [" in bar) == ("training" in parts), bar
        if "training" in parts:
            assert re.search(rf"\b{STEPS}/{STEPS} steps \[[0-9:]+<00:00\]", bar), bar
        if "sampling" in parts:
            assert re.search(r"/images: 100%.* 30/30 images \[[0-9:]+<00:00\]", bar), bar
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
    """Return a function that opens the page and records its requests and errors."""
    contexts = []

    def run(width=1200, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.requested, page.errors = [], []
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("console", lambda message: page.errors.append(message.text))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto((demo / "index.html").as_uri())
        return page

    yield run
    for context in contexts:
        context.close()


def test_flags_set_steps_and_folder(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    assert demo.parse_args([]).steps == demo.STEPS
    assert demo.parse_args(["--quick"]).steps == demo.QUICK_STEPS
    assert demo.parse_args(["--steps", "70"]).steps == 70
    # They use different folders.
    folders = {demo.parse_args(flags).folder for flags in ([], ["--quick"], ["--steps", "70"])}
    assert len(folders) == 3
    with pytest.raises(SystemExit) as refused:
        demo.parse_args(["--steps", "0"])
    assert refused.value.code == 2
    assert "--steps must be at least 10, got 0" in capsys.readouterr().err


def test_keeps_folders_that_are_not_runs(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "thesis.txt").write_text("years")
    with pytest.raises(SystemExit, match="contains other files: pass another --folder"):
        demo.train(tmp_path / "none", "none", "without scaling", 3)
    assert (tmp_path / "none" / "thesis.txt").read_text() == "years"


def test_keeps_runs_with_other_settings(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo

    folder = tmp_path / "cs"
    (folder / "checkpoint-20000").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({**demo.TRAINING, "max_train_steps": 20000}))
    with pytest.raises(SystemExit, match="contains other files: pass another --folder, or delete it"):
        demo.train(folder, "cs", "with CS", 3000)
    assert (folder / "checkpoint-20000").is_dir()


@pytest.mark.slow
def test_resumed_demo_logs_each_step_once(demo):
    for method in ("none", "cs"):
        lines = [json.loads(line) for line in (demo / method / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [10, 20, STEPS]
    assert json.loads((demo / "none" / "settings.json").read_text())["resume_from_checkpoint"] == "latest"
    assert json.loads((demo / "cs" / "settings.json").read_text())["resume_from_checkpoint"] is None


@pytest.mark.slow
def test_page_loads_nothing_and_has_no_errors(opened, demo):
    page = opened()
    assert page.errors == []
    assert [url for url in page.requested if not url.startswith("data:")] == [(demo / "index.html").as_uri()]


@pytest.mark.slow
def test_images_and_charts_say_what_they_show(opened):
    page = opened()
    images = page.evaluate("[...document.images].map(image => [image.naturalWidth, image.alt])")
    assert len(images) == 60
    assert all(width == 16 for width, _ in images)
    assert all(alt.startswith("wanted ") and ", shows " in alt for _, alt in images)
    wrong = [alt for _, alt in images if len(set(alt.removeprefix("wanted ").split(", shows "))) == 2]
    framed = page.evaluate("[...document.querySelectorAll('img.wrong')].map(image => image.alt)")
    assert framed == wrong
    assert wrong
    # Each image is in the column of its color and the row of its shape.
    wanted = page.evaluate(
        "[...document.querySelectorAll('.images')].map(table => {"
        "  const heads = [...table.tHead.rows[0].cells].slice(1).map(cell => cell.innerText);"
        "  return [...table.tBodies[0].rows].flatMap(row => heads.map((color, k) =>"
        "    [color + ' ' + row.cells[0].innerText, row.cells[k + 1].querySelector('img').alt]));"
        "})"
    )
    assert [len(table) for table in wanted] == [30, 30]
    assert all(alt.startswith(f"wanted {name}, ") for table in wanted for name, alt in table)
    curves = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.querySelectorAll('polyline').length)")
    assert curves == [2, 2]
    assert page.locator("svg[role=img][aria-label]").count() == 2


@pytest.mark.slow
def test_page_fits_a_phone(opened):
    page = opened(width=390, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Wider elements scroll on their own and can be reached by keyboard.
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => [e.tagName, e.tabIndex])"
    )
    assert {name for name, _ in wide} == {"DIV", "PRE"}
    assert all(index == 0 for _, index in wide)
    # Numbers in the charts are large enough and not cut off.
    heights = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10
    left = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().left)")
    assert min(left) >= 0


CONTRASTS = """
() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = color => color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const paper = luminance(numbers(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('h1, h2, h3, p, figcaption, caption, th, td, code, svg text')].map(element => {
    const style = getComputedStyle(element);
    const ink = luminance(numbers(element instanceof SVGElement ? style.fill : style.color));
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
  });
}
"""


@pytest.mark.slow
def test_text_has_enough_contrast(opened):
    page = opened()
    papers = []
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"media": "print"}):
        page.emulate_media(**media)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert min(contrasts) >= 4.5, media
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(21, 24, 28)", "rgb(255, 255, 255)"]


@pytest.mark.slow
def test_page_starts_with_a_verdict_and_ends_with_next_steps(opened):
    page = opened()
    verdict = page.locator("section p").first.inner_text()
    assert re.fullmatch(
        r"(The model with(out scaling| CS) ended with the lower validation loss: [\d.]+, not [\d.]+\.|"
        r"Both models ended with a validation loss of [\d.]+\.) "
        r"Images with the right color and shape, of 30: \d+ without scaling, \d+ with CS\.",
        verdict,
    )
    assert "docs/train_on_your_images.md" in page.locator("section", has_text="Next").last.inner_text()


@pytest.mark.slow
def test_code_on_the_page_loads_the_model(opened, demo, monkeypatch):
    monkeypatch.chdir(demo)
    exec(opened().locator("pre code").inner_text(), {})
    assert (demo / "image.png").stat().st_size > 0
