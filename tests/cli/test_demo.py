"""`make demo` with few steps: it resumes after an interruption, and its page works in a real browser."""

import html
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, ImageColor
from web_pages import check_contrast

from scalelong_diffusers.cli import demo, main
from scalelong_diffusers.cli.demo_page import Frame, Run, build_page
from scalelong_diffusers.cli.demo_picture import draw_film
from scalelong_diffusers.data import COLORS
from scalelong_diffusers.data.shapes import Drawing
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.grids import cut_grid, draw_grid


STEPS = 24
RUNS = ("plain", "residual")
# Few images to train on, one sample per class, and two sampling steps.
SMALL_DEMO = """
import sys
from scalelong_diffusers.cli import demo, main
demo.NUM_IMAGES = 600
demo.SAMPLES = 30
demo.SAMPLING["steps"] = 2
sys.exit(main(["demo", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """Run the demo, interrupt both trainings, run it again, and return its folder."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-c", SMALL_DEMO, "--steps", str(STEPS), "--output_dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    logs = [folder / name / "metrics.jsonl" for name in RUNS]
    deadline = time.monotonic() + 240
    while not all(log.exists() and log.read_text() for log in logs):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    errors = first.communicate(timeout=60)[1]
    assert first.returncode == 130
    assert "Traceback" not in errors
    assert "scalelong: interrupted; run the same command again to resume" in errors
    assert not (folder / "index.html").exists()
    assert all(list((folder / name).glob("checkpoint-*")) for name in RUNS)
    assert "stopped by SIGTERM after step" in "".join((folder / f"{name}.log").read_text() for name in RUNS)
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    # The rest of the trainings and both samplings, each with a progress bar.
    assert re.match(r"training [12] of 2 models; their output is in .*\.log\n", again.stdout)
    assert re.search(rf"100%.* {STEPS}/{STEPS} steps \[[0-9:]+<00:00\], loss [\d.]+", again.stderr), again.stderr
    bars = re.split(r"(?=/images: +0%)", again.stderr)
    assert len(bars) == 3
    for bar in bars[1:]:
        assert re.search(r"/images: 100%.* 30/30 images \[[0-9:]+<00:00\]", bar), bar
    page, film = (folder / "index.html").as_uri(), folder / "samples.png"
    assert again.stdout.endswith(f"samples during training: {film}\nopen {page}\n")
    assert film.stat().st_size > 0
    return folder


@pytest.fixture
def opened(open_page, demo_folder):
    """Return a function that opens the page."""
    return partial(open_page, demo_folder / "index.html")


def test_picture_for_a_readme():
    """Draw a row for each run and a column for each step, on a transparent background."""
    colors = {"plain": ("red", "yellow"), "residual": ("blue", "lime")}
    runs = [Run(name, {}, [], [frame_of(k, color) for k, color in enumerate(colors[name])], []) for name in RUNS]
    picture = Image.open(io.BytesIO(draw_film(runs))).convert("RGBA")
    assert picture.size == (2 * 384 + 32, 2 * (320 + 2 * 44) + 32)
    for row, name in enumerate(RUNS):
        for column, color in enumerate(colors[name]):
            left, top = column * (384 + 32), row * (320 + 2 * 44 + 32) + 44
            for x, y in ((left, top), (left + 383, top + 319)):
                drawn = picture.getpixel((x, y))
                assert max(abs(a - b) for a, b in zip(drawn, ImageColor.getrgb(color))) < 8, "nearly, in a palette"
            assert picture.getpixel((left + 380, top - 20))[3] == 0


def test_picture_of_a_run_that_diverged():
    runs = [Run(name, {}, [], [Frame(6, None, 0)], []) for name in RUNS]
    assert Image.open(io.BytesIO(draw_film(runs))).size == (384, 848)


def frame_of(step, color):
    file = io.BytesIO()
    Image.new("RGB", (6, 5), color).save(file, "PNG")
    return Frame(step, file.getvalue(), 30)


def test_flags_set_steps_and_folder(monkeypatch, capsys, tmp_path):
    trained = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "exit_on_signals", lambda: None)
    monkeypatch.setattr(demo, "train", lambda folder, steps: trained.append((folder.relative_to(tmp_path), steps)))
    monkeypatch.setattr(demo, "finish_run", lambda folder, steps: None)
    monkeypatch.setattr(demo, "build_page", lambda *arguments, **options: "")
    monkeypatch.setattr(demo, "draw_film", lambda runs: b"")
    for flags in ([], ["--quick"], ["--steps", "70"], ["--output_dir", "here"]):
        assert main(["demo", *flags]) == 0
    expected = {"runs/demo": 2400, "runs/demo-150": 150, "runs/demo-70": 70, "here": 2400}
    assert trained == [(Path(folder), steps) for folder, steps in expected.items()]
    capsys.readouterr()
    assert main(["demo", "--steps", "0"]) == 2
    assert "--steps must be at least 10 and at most 1,000,000, got 0" in capsys.readouterr().err
    Path("file").touch()
    assert main(["demo", "--output_dir", "file"]) == 2
    assert "cannot write to --output_dir" in capsys.readouterr().err


def test_keeps_folders_that_are_not_runs(monkeypatch, tmp_path):
    folder = tmp_path / "plain"
    (folder / "samples").mkdir(parents=True)
    for name in ("thesis.txt", "settings.json"):
        with pytest.raises(UserError, match="contains other files: pass another --output_dir"):
            demo.training_command(folder, STEPS)
        (folder / name).write_text("{}")
    with pytest.raises(UserError, match="contains other files: pass another --output_dir"):
        demo.train(tmp_path, STEPS)
    assert (folder / "thesis.txt").read_text() == "{}"


def test_a_killed_run_without_checkpoint_starts_again_unless_it_is_alive(tmp_path):
    folder = tmp_path / "plain"
    (folder / ".scalelong-partial-5").mkdir(parents=True)
    (folder / "settings.json").write_text("{}")
    holder = "import sys; from pathlib import Path; from scalelong_diffusers.locks import FolderLock\n"
    holder += "FolderLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=r"plain is in use by process"):
        demo.training_command(folder, STEPS)
    assert (folder / "settings.json").exists()
    process.kill()
    process.communicate()
    assert (folder / ".scalelong-lock").exists()
    assert demo.training_command(folder, STEPS) is not None
    assert not folder.exists()


def test_keeps_runs_with_other_settings(monkeypatch, tmp_path):
    folder = tmp_path / "residual"
    (folder / "checkpoint-20000").mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({**demo.TRAINING, "max_train_steps": 20000}))
    with pytest.raises(UserError, match="contains other files: pass another --output_dir, or delete it"):
        demo.training_command(folder, 3000)
    assert (folder / "checkpoint-20000").is_dir()


def test_film_cuts_grids_into_classes(monkeypatch, tmp_path):
    assert demo.film_steps(4000) == [1000, 2000, 3000, 4000]
    assert demo.film_steps(24) == [6, 12, 18, 24]
    drawings = {f"{drawing.color} {drawing.shape}": drawing for drawing in map(Drawing.from_number, range(30))}
    drawn = [demo.easier(drawings[name]).paint(demo.MODEL["sample_size"]) for name in demo.CLASSES]
    drawn[7], drawn[8] = drawn[8], drawn[7]
    (tmp_path / "samples").mkdir()
    picture = draw_grid([Image.fromarray(pixels) for pixels in drawn], demo.CLASSES)
    picture.save(tmp_path / "samples" / "step-000006.png")
    frame = demo.read_frame(tmp_path, 6)
    assert frame.correct == 28
    size = (demo.MODEL["sample_size"],) * 2
    columns = cut_grid(Image.open(io.BytesIO(frame.png)), size, has_titles=False)[:6]
    assert [demo.recognize_class(image) for image in columns] == [f"{color} circle" for color in COLORS]
    assert demo.read_frame(tmp_path, 12) == demo.Frame(12, None, 0)


def test_draws_a_dataset_whose_classes_can_be_recognized(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "NUM_IMAGES", 300)
    (tmp_path / "data.partial").mkdir()  # of a process that was killed
    demo.draw_images(tmp_path / "data")
    files = sorted((tmp_path / "data").rglob("*.png"))
    assert [file.parent.name for file in files[::10]] == demo.CLASSES
    assert all(demo.recognize_class(Image.open(file)) == file.parent.name for file in files)
    assert not (tmp_path / "data.partial").exists()
    monkeypatch.setattr(demo, "easier", None)
    demo.draw_images(tmp_path / "data")  # draws nothing


def test_diverged_trainings_end_on_the_page_and_others_end_the_demo(monkeypatch, tmp_path):
    folder = tmp_path / "plain"
    failed = SimpleNamespace(poll=lambda: 1)
    message = "train: step 90: 10 steps in a row had a non-finite loss or gradient; try a lower --learning_rate"
    (tmp_path / "plain.log").write_text(f"0%| 90/400 steps\n{message}\n")
    demo.check_exit(folder, failed)
    run = demo.finish_run(folder, 400)
    assert run.diverged
    assert run.images == []
    (tmp_path / "plain.log").write_text("train: cannot write the log: no space left on device\n")
    with pytest.raises(SystemExit, match=r"scalelong: the training in .*plain failed: train: cannot write the log"):
        demo.check_exit(folder, failed)


@pytest.mark.parametrize(
    ("plain", "residual", "sentence"),
    [
        (
            [0.9, 0.5, 0.4, 0.3],
            [0.8, 0.3, 0.2, 0.1],
            "With the residual start, the same U-ViT reached the plain model's final loss in 2,000 of 4,000 steps: "
            "2.0 times fewer.",
        ),
        (
            [0.9, 0.5, 0.4, 0.3],
            [0.8, 0.6, 0.4, 0.3],
            "With the residual start, the same U-ViT reached the plain model's final loss only at the end, after "
            "4,000 steps.",
        ),
        (
            [0.9, 0.5, 0.4, 0.3],
            [0.8, 0.6, 0.5, 0.4],
            "With the residual start, the same U-ViT did not reach the plain model's final loss in 4,000 steps.",
        ),
        ([0.9, 0.5, 1.4, 1.3], [0.8, 0.6, 0.5, 0.4], "The plain U-ViT diverged, so there is no ratio of steps."),
        ([0.9, 0.5], [0.8, 0.6, 0.5, 0.4], "The plain U-ViT diverged, so there is no ratio of steps."),
        ([0.9, 0.5, 0.4, 0.3], [], "The residual start diverged, so there is no ratio of steps."),
        (
            [0.9, 0.5, 0.4, None],
            [0.8, 0.6, 0.5, 0.9],
            "The plain U-ViT and the residual start diverged, so there is no ratio of steps.",
        ),
    ],
)
def test_first_sentence_gives_the_ratio_of_steps(monkeypatch, plain, residual, sentence):
    runs = []
    for setup, losses in zip(demo.RUNS.values(), (plain, residual)):
        metrics = [{"step": 1000 * k, "grad_norm": 0.5, "images_per_second": 9.0} for k in range(1, 5)]
        for line, loss in zip(metrics, losses):
            line["validation_loss"] = loss
        stopped = len(losses) < 4
        images = [] if stopped else [(wanted, b"", wanted) for wanted in demo.SHAPE_CLASSES]
        runs.append(Run(setup["label"], setup["flags"], metrics, [Frame(1000, None, 0)], images))
    settings = {**demo.TRAINING, "max_train_steps": 4000}
    page = build_page(runs, settings, {}, pilot={0: 2.5, 1: 2.11, 2: 2.9}, full_steps=4000)
    text = html.unescape(re.sub("<[^>]+>", "", page[page.index("<p") :]))
    assert text.startswith(sentence)
    assert "With 4,000 steps and the seeds 0, 1 and 2, they had ratios from 2.1 to 2.9." in text


@pytest.mark.slow
def test_resumed_demo_logs_each_step_once(demo_folder):
    for name in RUNS:
        lines = [json.loads(line) for line in (demo_folder / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [10, 20, STEPS]
    settings = [json.loads((demo_folder / name / "settings.json").read_text()) for name in RUNS]
    assert "latest" in [each["resume_from_checkpoint"] for each in settings]
    assert [each["skip_init"] for each in settings] == ["reference", "sum"]
    assert [json.loads((demo_folder / f"{name}.json").read_text())["block_scale"] for name in RUNS] == [1.0, "rezero"]


@pytest.mark.slow
def test_page_loads_nothing_and_has_no_errors(opened, demo_folder):
    page = opened()
    assert page.errors == []
    assert [url for url in page.requested if not url.startswith("data:")] == [(demo_folder / "index.html").as_uri()]


@pytest.mark.slow
def test_images_and_charts_say_what_they_show(opened):
    page = opened()
    images = page.evaluate(
        "[...document.querySelectorAll('.images img')].map(image => [image.naturalWidth, image.alt])"
    )
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
    count = "[...document.querySelectorAll('svg')].map(svg => svg.querySelectorAll('polyline:not(.mark)').length)"
    assert page.evaluate(count) == [2, 2]
    assert page.locator("svg[role=img][aria-label]").count() == 2


FILM = """
[...document.querySelectorAll('.film img')].map(image => {
  const box = image.getBoundingClientRect();
  return [image.alt, image.naturalWidth, box.left, box.top, box.width];
})
"""


@pytest.mark.slow
def test_film_strip_compares_the_runs_at_equal_steps(opened):
    wide, narrow = opened(), opened(width=390, is_mobile=True)
    for page, row, column in ((wide, 3, 2), (narrow, 2, 3)):
        film = page.evaluate(FILM)
        expected = [
            f"{run} after {step} steps" for run in ("plain U-ViT", "residual start") for step in (6, 12, 18, 24)
        ]
        assert [alt.split(":")[0] for alt, *_ in film] == expected
        assert all(re.search(r": \d+ of 30 right$", alt) for alt, *_ in film)
        assert {width for _, width, *_ in film} == {6 * 128}
        # One row per run, or one column per run on a phone.
        plain, residual = film[:4], film[4:]
        assert len({picture[row] for picture in plain}) == len({picture[row] for picture in residual}) == 1
        assert all(a[column] == b[column] for a, b in zip(plain, residual))
        assert min(picture[4] for picture in film) > 150


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


@pytest.mark.slow
def test_text_has_enough_contrast(opened):
    check_contrast(opened())


@pytest.mark.slow
def test_page_starts_with_a_verdict_and_ends_with_next_steps(opened):
    page = opened()
    first, trial, results, pilot = page.locator("main > p").all_inner_texts()
    assert "residual start" in first
    assert trial.startswith(f"This trial has only {STEPS} steps")
    assert re.match(
        r"Right color and shape at the end: \d+ of 30 images with the plain U-ViT, \d+ with the residual start\. "
        r"Mean gradient norm in the second half: [\d.]+ and [\d.]+\. Final validation loss: [\d.]+ and [\d.]+\.$",
        results,
    )
    assert pilot.startswith("Pilot runs fixed the settings beforehand; ")
    assert "docs/which_method.md" in pilot
    assert "docs/train_on_your_images.md" in page.locator("section", has_text="Next").last.inner_text()


@pytest.mark.slow
def test_code_on_the_page_loads_the_model(opened, demo_folder, monkeypatch):
    monkeypatch.chdir(demo_folder)
    exec(opened().locator("pre code").inner_text(), {})
    assert (demo_folder / "image.png").stat().st_size > 0
