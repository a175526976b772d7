"""`scalelong app` in a real browser: sample, move sliders, train, stop, diagnose."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from diffusers import DDIMScheduler
from web_pages import CONTRASTS

from scalelong_diffusers import ScaleLongClassConditionalPipeline, UViTModel
from scalelong_diffusers.cli import main


pytestmark = pytest.mark.slow

# Runs the command, and prints each address outside of this machine that the process tries to reach.
COMMAND = """
import signal, sys

def audit(event, arguments):
    if event == "socket.connect" and arguments[1][0] not in ("127.0.0.1", "::1", "localhost"):
        print("connects to", arguments[1], flush=True)

sys.addaudithook(audit)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from scalelong_diffusers.cli import main
sys.exit(main(["app", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = {"sample_size": 8, "hidden_size": 16, "num_layers": 6, "num_attention_heads": 2, "num_class_embeds": 4}
    unet = UViTModel(**config, skip_scaling={"method": "cs", "kappa": 0.5})
    names = ["cat", "dog", "<b>bird</b> ${1}"]
    ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), class_names=names, null_class=3).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@pytest.fixture(scope="module")
def app(model, tmp_path_factory):
    """Start the app in a new folder, and end it as Ctrl-C does."""
    folder = tmp_path_factory.mktemp("work")
    command = [sys.executable, "-c", COMMAND, str(model), "--server_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "errors.txt", "w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    opened = re.fullmatch(r"open (http://127\.0\.0\.1:\d+/) \(Ctrl-C stops the app\)\n", process.stdout.readline())
    assert opened, (folder / "errors.txt").read_text()
    process.address, process.folder = opened[1], folder
    yield process
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=100)
    assert (process.returncode, rest) == (0, "")  # nor has it connected to any other machine
    assert "Traceback" not in (folder / "errors.txt").read_text()


@pytest.fixture
def opened(open_page, app):
    """Return a function that opens the app and waits for its model."""

    def run(**options):
        page = open_page(app.address, **options)
        page.set_default_timeout(60_000)
        page.get_by_text("scaled with cs, kappa 0.5").wait_for()
        return page

    return run


SOURCES = "[...document.querySelectorAll('.pair figure')].map(f => [...f.querySelectorAll('img')].map(i => i.src))"
WAIT = f"before => {{ const now = {SOURCES}; return now.length == 2 && JSON.stringify(now) != before; }}"


def sample(page) -> list[list[str]]:
    page.get_by_role("button", name="Sample").click()
    return changed(page, "[]")


def changed(page, before) -> list[list[str]]:
    """Wait until the images differ, and return their content by figure."""
    page.wait_for_function(WAIT, arg=page.evaluate("JSON.stringify", before) if before != "[]" else before)
    return page.evaluate(SOURCES)


def move(page, name: str, value: float):
    page.get_by_label(f"range slider for {name}").fill(str(value))


def test_sliders_change_pixels_on_the_same_noise(opened):
    page = opened()
    plain, own = sample(page)
    assert len(plain) == len(own) == 9
    assert plain != own
    assert page.locator("table.skips tbody tr").all_inner_texts()[-1].split() == [
        "3",
        "out_blocks.0.skip_proj",
        "16",
        "0.25",
    ]
    move(page, "Kappa", 0.2)
    same, scaled = changed(page, [plain, own])
    assert same == plain
    assert scaled not in (own, plain)
    page.get_by_text("with cs, kappa 0.2", exact=True).wait_for()
    assert page.locator("table.skips tbody tr").all_inner_texts()[-1].split()[-1] == "0.04"
    move(page, "Strength", 0)
    assert changed(page, [plain, scaled]) == [plain, plain]
    assert page.locator("table.skips tbody tr").all_inner_texts()[-1].split()[-1] == "1"


def test_images_name_their_classes(opened):
    page = opened()
    sample(page)
    names = page.evaluate("[...document.querySelectorAll('.pair img')].map(image => image.alt)")
    assert names[:3] == ["without scaling: cat", "without scaling: dog", "without scaling: <b>bird</b> ${1}"]
    assert names[9] == "with cs, kappa 0.5: cat"
    assert page.locator(".images b").count() == 0


def test_loads_nothing_from_other_machines(opened, app):
    page = opened()
    sample(page)
    others = [url for url in page.requested if not url.startswith((app.address, "data:", "blob:"))]
    assert others == []
    assert page.errors == []


def test_listens_only_on_this_machine(app):
    port = int(app.address.rsplit(":")[-1].strip("/"))
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = [entry[1] for entry in listening if entry[3] == "0A" and entry[1].endswith(f":{port:04X}")]
    assert addresses == [f"0100007F:{port:04X}"]
    others = [line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not any(address.endswith(f":{port:04X}") for address in others)


def test_works_with_the_keyboard(opened):
    page = opened()

    def tab_to(name: str):
        for _ in range(60):
            page.keyboard.press("Tab")
            if name == page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
            ):
                return
        pytest.fail(f"cannot reach {name}")

    tab_to("Sample")  # the tab
    tab_to("Sample")
    page.keyboard.press("Enter")
    plain, own = changed(page, "[]")
    tab_to("range slider for Kappa")
    page.keyboard.press("ArrowLeft")
    same, scaled = changed(page, [plain, own])
    assert same == plain
    assert scaled != own


def test_fits_a_phone(opened):
    page = opened(width=390, is_mobile=True, has_touch=True)
    sample(page)
    for tab in ("Sample", "Train", "Diagnose"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("tab", name="Sample").click()
    widths = page.evaluate("[...document.querySelectorAll('.pair figure')].map(f => f.getBoundingClientRect().width)")
    assert min(widths) > 250


def test_text_has_enough_contrast(opened):
    for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(15, 15, 17)")):
        page = opened(color_scheme=scheme)
        sample(page)
        # The text of inputs and their notes, also on the panels that hold them.
        texts = CONTRASTS.replace("'h1,", "'label span, .block span, .images span, .pair figcaption, h1,")
        contrasts = page.evaluate(texts)
        assert len(contrasts) > 40
        assert min(contrasts) >= 4.5, scheme
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper


def test_errors_are_messages(opened, tmp_path):
    page = opened()
    load = partial(page.get_by_role("button", name="Load").click)
    page.get_by_label("Model").first.fill(str(tmp_path / "<i>nothing</i>"))
    load()
    page.get_by_text("<i>nothing</i> is neither a local folder nor a Hub repository").wait_for()
    page.get_by_label("Seed").fill("")
    page.get_by_role("button", name="Sample").click()
    page.get_by_text("seed must be an integer").wait_for()
    page.get_by_label("Seed").fill("5")
    sample(page)


def children(process) -> list[str]:
    """Return the commands of the processes that the app has started."""
    ids = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [
        Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for file in ids for pid in file.read_text().split()
    ]


@pytest.mark.timeout(600)
def test_training_draws_a_curve_and_can_be_stopped(opened, app):
    page = opened()
    page.get_by_role("tab", name="Train").click()
    page.get_by_label("Steps").last.fill("400")
    page.get_by_role("button", name="Start").click()
    page.locator("svg.curves polyline").first.wait_for(timeout=280_000)
    (training,) = children(app)
    assert "scalelong_diffusers.train.train_class_conditional" in training
    page.get_by_role("button", name="Start").click()
    page.get_by_text("a training is already running: stop it first").wait_for()
    page.locator(".picture img").first.wait_for(timeout=280_000)
    # A page that is opened later shows the same training.
    other = opened()
    other.get_by_role("tab", name="Train").click()
    other.locator("svg.curves polyline").first.wait_for()
    page.get_by_role("button", name="Stop").first.click()
    stopped = "[...document.querySelectorAll('textarea, input')].some(e => e.value == 'Stopped.')"
    page.wait_for_function(stopped, timeout=280_000)
    assert children(app) == []
    assert list((app.folder / "runs" / "app").glob("checkpoint-*"))


@pytest.mark.timeout(600)
def test_failed_trainings_show_their_message(opened, app):
    page = opened()
    page.get_by_role("tab", name="Train").click()
    page.get_by_label("Learning rate").fill("7")
    page.get_by_role("button", name="Start").click()
    page.get_by_text(re.compile("learning_rate must be a number, .* got 7")).wait_for()
    folder = app.folder / "other"
    (folder / "unet").mkdir(parents=True)
    page.get_by_label("Learning rate").fill("0.001")
    page.get_by_label("Output folder").fill(str(folder))
    page.get_by_role("button", name="Start").click()
    page.get_by_text(re.compile(r"the training failed: train_class_conditional: .*unet")).wait_for(timeout=280_000)
    assert children(app) == []


@pytest.mark.timeout(600)
def test_diagnosis_shows_its_page(opened, model):
    page = opened()
    page.get_by_role("tab", name="Diagnose").click()
    assert page.get_by_label("Model").last.input_value() == str(model)
    page.get_by_label("number input for Images").last.fill("8")
    page.get_by_role("button", name="Diagnose").click()
    report = page.frame_locator("iframe.report")
    report.get_by_text("The rules", exact=True).wait_for(timeout=280_000)
    assert report.locator("h1").inner_text() == f"Diagnosis of {model}"
    assert report.locator("svg polyline").count() > 5


def test_text_models_take_prompts_and_guidance(opened, tiny_stable_diffusion, tmp_path):
    """The last test with a page, because all pages show the model that was loaded last."""
    tiny_stable_diffusion.save_pretrained(tmp_path)
    page = opened()
    page.get_by_label("Model").first.fill(str(tmp_path))
    page.get_by_role("button", name="Load").click()
    page.get_by_label("Prompts").fill("a red circle\na blue star")
    move(page, "Images", 2)
    move(page, "Steps", 2)
    first = sample(page)
    names = page.evaluate("[...document.querySelectorAll('.pair img')].map(image => image.alt)")
    assert names[:2] == ["without scaling: a red circle", "without scaling: a blue star"]
    move(page, "Guidance", 3)
    page.get_by_role("button", name="Sample").click()
    guided = changed(page, first)
    page.get_by_label("Negative prompt").fill("a star")
    page.get_by_role("button", name="Sample").click()
    assert changed(page, guided)[0] != guided[0]


def test_bad_input_ends_the_command(tmp_path, capsys):
    cases = {
        (tmp_path,): f"scalelong: {tmp_path} is not a pipeline: it has no model_index.json",
        ("--server_port", 0): "scalelong: --server_port must be an integer, at least 1 and at most 65,535, got 0",
    }
    for arguments, message in cases.items():
        assert main(["app", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_a_port_that_is_taken_ends_the_command(app):
    port = app.address.rsplit(":")[-1].strip("/")
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "app", "--server_port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"scalelong: --server_port {port} cannot be used: ")


def test_visitors_of_a_space_can_only_sample(model, project_root):
    port = free_port()
    environment = {**os.environ, "MODEL": str(model), "GRADIO_SERVER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, project_root / "spaces" / "app.py"], env=environment) as process:
        try:
            events = json.loads(read_when_ready(f"http://127.0.0.1:{port}/config"))["dependencies"]
        finally:
            process.kill()
    assert {event["api_name"] for event in events} == {"show", "show_kappa", "draw", "draw_1"}


def read_when_ready(address: str) -> str:
    deadline = time.monotonic() + 200
    while True:
        try:
            with urlopen(address) as response:
                return response.read().decode()
        except URLError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_app_without_gradio_says_what_to_install(scalelong, monkeypatch):
    monkeypatch.setattr("scalelong_diffusers.cli.app.find_spec", lambda name: None)
    code, printed, errors = scalelong("app")
    assert (code, printed) == (2, "")
    assert errors == "scalelong: the app needs gradio: pip install 'scalelong-diffusers[app]'\n"
