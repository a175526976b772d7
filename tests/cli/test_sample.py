"""`scalelong sample`: what the images depend on, how the command resumes, and what it rejects."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMScheduler, EDMEulerScheduler
from PIL import Image

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
    UserError,
    UViTModel,
)
from scalelong_diffusers.pipelines.grids import cut_grid
from scalelong_diffusers.pipelines.sampling import SCHEDULERS, SampleConfig, Sampler, scheduler_by_name
from scalelong_diffusers.randomness import generator_for


@pytest.fixture
def sample(scalelong):
    return lambda *arguments: scalelong("sample", *arguments)


def uvit(seed=0, **config):
    torch.manual_seed(seed)
    config = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, **config}
    return UViTModel(**config, skip_scaling="cs").eval()


@pytest.fixture
def classes(tmp_path):
    """A pipeline of the classes cat, dog, 7 and bird."""
    names = ["cat", "dog", "7", "bird"]
    pipe = ScaleLongClassConditionalPipeline(
        uvit(num_class_embeds=5), DDIMScheduler(), class_names=names, null_class=4
    )
    pipe.save_pretrained(tmp_path / "classes")
    return tmp_path / "classes"


@pytest.fixture
def unconditional(tmp_path):
    ScaleLongUnconditionalPipeline(uvit(), DDIMScheduler()).save_pretrained(tmp_path / "unconditional")
    return tmp_path / "unconditional"


@pytest.fixture
def text(tiny_clip, tmp_path):
    unet = uvit(cross_attention_dim=16, context_length=12)
    ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
    return tmp_path / "text"


def pixels(folder: Path, k: int | str) -> np.ndarray:
    with Image.open(folder / (f"{k:06d}.png" if isinstance(k, int) else f"{k}.png")) as image:
        return np.asarray(image).astype(int)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


FAST = ("--num_inference_steps", 2)


def test_makes_images_a_grid_and_their_settings(sample, classes, tmp_path):
    out = tmp_path / "out"
    condition = ["--class_labels", "cat", "bird", "--guidance_scale", 3]
    code, printed, shown = sample(
        classes, "--output_dir", out, "--num_images", 5, *FAST, *condition, "--scheduler", "dpm++"
    )
    assert code == 0
    assert printed == f"{out}: 5 images, 5 of them new, and a grid: {out}/grid.png\n"
    assert names_in(out) == [*(f"{k:06d}.png" for k in range(5)), "grid.png", "sample.json"]
    with Image.open(out / "grid.png") as picture:
        assert picture.size == (256, 3 * 156), "one column for each class"
        assert np.array_equal(cut_grid(picture, (8, 8), has_titles=True)[3], pixels(out, 3))
    assert "5/5 images [" in shown
    assert "<00:00]" in shown, "the remaining time"
    settings = json.loads((out / "sample.json").read_text())
    assert (settings["scheduler"], settings["num_inference_steps"], settings["guidance_scale"]) == ("dpm++", 2, 3.0)
    assert settings["class_labels"] == ["cat", "bird"]


def test_short_flags_mean_the_same(sample, classes, tmp_path):
    long = ["--output_dir", tmp_path / "long", "--num_images", 2, "--num_inference_steps", 3]
    short = ["--out", tmp_path / "short", "-n", 2, "--steps", 3]
    assert sample(classes, *long, "--class_labels", "dog", "--guidance_scale", 2)[0] == 0
    assert sample(classes, *short, "--class", "dog", "--guidance", 2)[0] == 0
    files = [tmp_path / name / "sample.json" for name in ("long", "short")]
    assert files[0].read_text() == files[1].read_text()
    assert np.array_equal(pixels(tmp_path / "long", 1), pixels(tmp_path / "short", 1))


def test_image_depends_only_on_seed_and_number(sample, classes, tmp_path):
    for name, options in {
        "one batch": ["-n", 6, "--batch_size", 6],
        "batches of two": ["-n", 6, "--batch-size", 2],
        "more": ["-n", 7, "--batch_size", 4],
        "seed 1": ["-n", 2, "--seed", 1],
    }.items():
        assert sample(classes, "--out", tmp_path / name, *options, *FAST, "--guidance_scale", 2)[0] == 0
    for k in range(6):
        image = pixels(tmp_path / "one batch", k)
        for name in ("batches of two", "more"):
            assert abs(image - pixels(tmp_path / name, k)).max() <= 1
    assert abs(pixels(tmp_path / "one batch", 0) - pixels(tmp_path / "seed 1", 0)).max() > 50
    assert abs(pixels(tmp_path / "one batch", 1) - pixels(tmp_path / "seed 1", 0)).max() > 50


def test_uses_classes_in_turn(sample, classes, tmp_path):
    assert sample(classes, "--out", tmp_path / "all", "-n", 6, *FAST)[0] == 0
    assert sample(classes, "--out", tmp_path / "some", "-n", 4, *FAST, "--class", "0", "dog", "7", "3")[0] == 0
    pipe = ScaleLongClassConditionalPipeline.from_pretrained(classes)
    for k in range(4):
        image = pipe(k, num_inference_steps=2, generator=generator_for(0, k), output_type="np").images
        for folder in ("all", "some"):
            assert abs(pixels(tmp_path / folder, k) - (image[0] * 255).round()).max() <= 1, (folder, k)


class TestResume:
    def test_makes_only_missing_images(self, sample, unconditional, tmp_path, monkeypatch):
        out = tmp_path / "out"
        sample(unconditional, "--out", out, "-n", 4, *FAST)
        (out / "000002.png").unlink()
        times = {name: (out / name).stat().st_mtime_ns for name in names_in(out)}
        made = []
        make = Sampler.make
        monkeypatch.setattr(Sampler, "make", lambda self, batch, *rest: made.append(batch) or make(self, batch, *rest))
        printed = sample(f"{unconditional}/", "--out", out, "-n", 6, "--batch_size", 2, *FAST)[1]
        assert printed.startswith(f"{out}: 6 images, 3 of them new")
        assert made == [[2, 4], [5]]
        assert all((out / name).stat().st_mtime_ns == time for name, time in times.items() if name[0] == "0")
        assert pixels(out, "grid").shape == (256, 384, 3)
        assert sample(unconditional, "--out", out, "-n", 6, *FAST)[1].startswith(f"{out}: 6 images, 0 of them new")

    def test_remakes_images_that_were_cut_off(self, sample, unconditional, tmp_path):
        out = tmp_path / "out"
        assert sample(unconditional, "--out", out, "-n", 3, *FAST)[0] == 0
        complete = (out / "000001.png").read_bytes()
        (out / "000001.png").write_bytes(complete[:60])
        (out / "000002.png").write_bytes(b"")
        assert ": 3 images, 2 of them new" in sample(unconditional, "--out", out, "-n", 3, *FAST)[1]
        assert (out / "000001.png").read_bytes() == complete

    def test_removes_only_its_own_leftovers(self, sample, unconditional, tmp_path):
        out = tmp_path / "out"
        for name in (".scalelong-partial-0123/000000.png", ".partial-1/a.txt"):
            (out / name).parent.mkdir(parents=True)
            (out / name).write_text("a")
        assert sample(unconditional, "--out", out, "-n", 1, *FAST)[0] == 0
        assert names_in(out) == [".partial-1", "000000.png", "grid.png", "sample.json"]

    def test_names_damaged_images(self, sample, unconditional, tmp_path):
        out = tmp_path / "out"
        sample(unconditional, "--out", out, "-n", 3, *FAST)
        content = bytearray((out / "000001.png").read_bytes())
        content[45:60] = bytes(15)
        (out / "000001.png").write_bytes(content)
        code, _, errors = sample(unconditional, "--out", out, "-n", 3, *FAST)
        assert code == 2
        assert f"{out}/000001.png cannot be read: " in errors.splitlines()[-1]

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_resumes_a_stopped_run(self, sample, unconditional, tmp_path, how):
        out = tmp_path / "out"
        flags = ["--out", out, "-n", 500, "--batch_size", 1, "--steps", 10]
        command = [sys.executable, "-m", "scalelong_diffusers.cli", "sample", unconditional, *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True, env=env)
        while process.poll() is None and not (out / "000003.png").is_file():
            time.sleep(0.02)
        process.send_signal(how)
        errors = process.communicate()[1]
        if how == signal.SIGINT:
            assert process.returncode == 130
            last = errors.splitlines()[-1]
            assert last == "scalelong: interrupted; run the same command again to resume"
            assert "Traceback" not in errors
        before = [name for name in names_in(out) if name[0] == "0" and name.endswith(".png")]
        assert 4 <= len(before) < 500
        for name in before:
            Image.open(out / name).load()
        flags[3] = len(before) + 1
        code, printed, _ = sample(unconditional, *flags)
        assert code == 0
        assert printed == f"{out}: {len(before) + 1} images, 1 of them new, and a grid: {out}/grid.png\n"

    def test_explains_how_to_resume_if_interrupted_while_loading(self, sample, unconditional, tmp_path, monkeypatch):
        def interrupt(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr("scalelong_diffusers.cli.sample.load_pipeline", interrupt)
        code, _, errors = sample(unconditional, "--out", tmp_path / "out")
        assert code == 130
        assert errors.startswith("scalelong: interrupted; ")


def test_escapes_the_name_of_the_folder(sample, unconditional, tmp_path):
    code, printed, errors = sample(unconditional, "--out", tmp_path / "a\x1b[31m\n", "-n", 1, *FAST)
    assert code == 0
    for text in (printed, errors):
        assert "a\\u001b[31m\\u000a: " in text
        assert "\x1b[31m" not in text


class TestFolder:
    def test_rejects_other_settings(self, sample, error_of, unconditional, classes, tmp_path):
        out = tmp_path / "out"
        sample(unconditional, "--out", out, "-n", 2, *FAST)
        (tmp_path / "copy").symlink_to(unconditional)
        for model, flags, difference in (
            (unconditional, ["--steps", 3], "num_inference_steps 2, not 3"),
            (unconditional, [*FAST, "--seed", 1], "seed 0, not 1"),
            (unconditional, [*FAST, "--scheduler", "euler"], "scheduler None, not 'euler'"),
            (tmp_path / "copy", FAST, f"model {str(unconditional)!r}, not {str(tmp_path / 'copy')!r}"),
        ):
            line = error_of("sample", model, "--out", out, "-n", 2, *flags)
            assert line.endswith(f"{out} has images made with {difference}: pass another --output_dir, or delete it")

    def test_names_the_first_different_prompt(self, sample, text, tmp_path):
        out = tmp_path / "out"
        many = [f"circle {k}" for k in range(1000)]
        flags = ["--out", out, *FAST, "-n", 1, "--prompt"]
        assert sample(text, *flags, *many)[0] == 0
        for prompts, difference in (
            (["a square"], "prompt 0 'circle 0', not 'a square'"),
            ([*many[:999], "red"], "prompt 999 'circle 999', not 'red'"),
            (many[:2], "prompt 2 'circle 2', not None"),
        ):
            code, _, errors = sample(text, *flags, *prompts)
            assert code == 2
            assert f"made with {difference}: pass another --output_dir" in errors.splitlines()[-1]

    def test_rejected_call_leaves_no_settings_to_compare_with(self, sample, unconditional, tmp_path):
        out = tmp_path / "out"
        assert sample(unconditional, "--out", out, "-n", 1, *FAST, "--guidance_scale", 2)[0] == 2
        assert sample(unconditional, "--out", out, "-n", 1, *FAST, "--width", 12)[0] == 0
        assert json.loads((out / "sample.json").read_text())["width"] == 12

    def test_rejects_a_name_that_is_too_long(self, error_of, unconditional, tmp_path):
        line = error_of("sample", unconditional, "--out", tmp_path / ("9" * 300), "-n", 1, *FAST)
        assert "File name too long" in line

    @pytest.mark.parametrize("model", [None, 5, ["m"]])
    def test_rejects_settings_without_the_name_of_a_model(self, sample, error_of, unconditional, tmp_path, model):
        out = tmp_path / "out"
        sample(unconditional, "--out", out, "-n", 1, *FAST)
        settings = json.loads((out / "sample.json").read_text())
        (out / "sample.json").write_text(json.dumps({**settings, "model": model}))
        message = f"{out} has images or a sample.json that this version"
        assert message in error_of("sample", unconditional, "--out", out, "-n", 2, *FAST)

    @pytest.mark.parametrize("content", ['{"model": "x', "[]", "{}", '{"model": "m", "steps": 2}'])
    def test_rejects_damaged_or_foreign_settings(self, sample, unconditional, tmp_path, content):
        out = tmp_path / "out"
        sample(unconditional, "--out", out, "-n", 1, *FAST)
        (out / "sample.json").write_text(content)
        code, _, errors = sample(unconditional, "--out", out, "-n", 2, *FAST)
        assert code == 2
        assert "sample.json" in errors.splitlines()[-1]
        assert "Traceback" not in errors
        assert (out / "sample.json").read_text() == content

    def test_overwrites_nothing_of_another_origin(self, sample, unconditional, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "grid.png")
        existing = {"grid.png": (tmp_path / "grid.png").read_bytes()}
        for content in (None, b'{"model": "of a camera"}'):
            if content is not None:
                (tmp_path / "sample.json").write_bytes(content)
                existing["sample.json"] = content
            code, _, errors = sample(unconditional, "--out", tmp_path, "-n", 2, *FAST)
            assert code == 2
            assert f"{tmp_path} has images or a sample.json that this version of `scalelong sample` did not" in errors
            assert {name: (tmp_path / name).read_bytes() for name in existing} == existing
            assert not (tmp_path / "000000.png").exists()

    def test_rejects_other_weights_in_the_same_folder(self, sample, error_of, unconditional, tmp_path):
        out = tmp_path / "out"
        assert sample(unconditional, "--out", out, "-n", 1, *FAST)[0] == 0
        before = (out / "000000.png").read_bytes()
        uvit().save_pretrained(unconditional / "unet")  # more training writes files of the same names and sizes
        line = error_of("sample", unconditional, "--out", out, "-n", 2, *FAST)
        assert re.search(
            r"out has images made with weights '.* bytes of .*', not '.* bytes of .*': pass another", line
        )
        assert [name for name in names_in(out) if name.endswith(".png")] == ["000000.png", "grid.png"]
        assert (out / "000000.png").read_bytes() == before


class TestModels:
    def test_rejects_images_that_are_not_finite(self, sample, unconditional, tmp_path):
        unet = uvit()
        unet.proj_out.bias.data.fill_(math.inf)
        unet.save_pretrained(unconditional / "unet")
        code, _, errors = sample(unconditional, "--out", tmp_path / "out", "-n", 2, *FAST)
        assert code == 2
        assert errors.splitlines()[-1].startswith("scalelong: ")
        assert "finite" in errors.splitlines()[-1]
        assert not list((tmp_path / "out").glob("*.png"))

    def test_samples_prompts_in_turn(self, sample, text, tmp_path):
        prompts = ["--prompt", "a red circle", "a circle", "--negative_prompt", "red"]
        assert sample(text, "--out", tmp_path / "out", "-n", 3, *FAST, *prompts)[0] == 0
        assert abs(pixels(tmp_path / "out", 0) - pixels(tmp_path / "out", 2)).max() > 5
        settings = json.loads((tmp_path / "out" / "sample.json").read_text())
        assert settings["guidance_scale"] == 7.5, "the pipeline's default"
        code, printed, _ = sample(text, "--out", tmp_path / "out", "-n", 4, *FAST, *prompts, "--guidance_scale", 7.5)
        assert code == 0
        assert ": 4 images, 1 of them new" in printed

    def test_samples_a_stock_pipeline(self, sample, ddpm, tmp_path):
        DDIMPipeline(ddpm.build_scaled("cs"), DDIMScheduler()).save_pretrained(tmp_path / "ddim")
        assert sample(tmp_path / "ddim", "--out", tmp_path / "out", "-n", 2, *FAST, "--dtype", "bfloat16")[0] == 0

    def test_samples_another_size(self, sample, unconditional, tmp_path):
        out = tmp_path / "out"
        assert sample(unconditional, "--out", out, "-n", 1, *FAST, "--height", 16, "--width", 12)[0] == 0
        assert pixels(out, 0).shape == (16, 12, 3)


class TestSchedulers:
    def test_keep_the_noise_schedule_of_the_model(self):
        own = DDPMScheduler(
            beta_start=0.001, beta_end=0.01, prediction_type="v_prediction", variance_type="learned_range"
        )
        unet = uvit(in_channels=4, out_channels=8)
        for name in SCHEDULERS:
            scheduler = scheduler_by_name(name, own)
            assert (scheduler.config.beta_start, scheduler.config.beta_end) == (0.001, 0.01), name
            assert scheduler.config.prediction_type == "v_prediction", name
            pipe = ScaleLongUnconditionalPipeline(unet, scheduler)
            pipe.set_progress_bar_config(disable=True)
            assert pipe(num_inference_steps=4, output_type="np").images.shape == (1, 8, 8, 4), name

    def test_need_a_beta_schedule(self):
        with pytest.raises(UserError, match="needs a beta schedule, which the model's own EDMEulerScheduler"):
            scheduler_by_name("ddim", EDMEulerScheduler())

    def test_suggest_the_nearest_name(self):
        for typed, meant in (("sde-dpmpp", "sde-dpm++"), ("dpm+", "dpm++"), ("ddmi", "ddpm")):
            with pytest.raises(UserError) as raised:
                SampleConfig("model", scheduler=typed)
            assert f"got {typed!r} (did you mean {meant!r}?)" in str(raised.value)


SIDES = ("--height", "65536", "--width", "65536")
BAD = {
    "class": (["classes", "--class", "brd"], ["'brd'", "'bird'"]),
    "number": (["classes", "--class", "9"], ["class 9", "0..3"]),
    "prompt for classes": (["classes", "--prompt", "a cat"], ["--prompt needs a text-to-image pipeline, and "]),
    "class for none": (["unconditional", "--class", "cat"], ["--class_labels needs a class-conditional pipeline"]),
    "guidance for none": (["unconditional", "--guidance", "3"], ["--guidance_scale needs a text-to-image or class-"]),
    "negative guidance": (["classes", "--guidance", "-1"], ["guidance_scale must be a number, at least 0 and"]),
    "scheduler": (["unconditional", "--scheduler", "dpm+"], ["--scheduler must be one", "(did you mean 'dpm++'?)"]),
    "steps": (["unconditional", "--steps", "0"], ["num_inference_steps must be an integer, at le"]),
    "too many steps": (["unconditional", "--steps", "9999"], ["num_inference_steps must be "]),
    "steps of DPM++": (["unconditional", "--steps", "1000", "--scheduler", "dpm++"], ["must be at most 999 for this"]),
    "far too many": (["unconditional", "--steps", "9999", "--scheduler", "dpm++"], ["must be at most 999 for this"]),
    "size": (["unconditional", "--width", "13"], ["width", "13", "multiple of 2"]),
    "number of images": (["unconditional", "-n", "0"], ["--num_images must be an integer, at least 1 and"]),
    "batch size": (["unconditional", "--batch_size", "0"], ["--batch_size must be an integer, at least 1"]),
    "huge height": (["unconditional", *("-n", "99", "--batch_size", "99", *SIDES)], ["would take at least", "GiB of"]),
    "height": (["unconditional", "--height", "100000"], ["--height must be an integer, at least 1 and at most"]),
    "device": (["unconditional", "--device", "gpu"], ["--device gpu cannot be used: "]),
    "dtype": (["unconditional", "--dtype", "int8"], ["--dtype must be one of float32, bfloat16, float16, got 'int8'"]),
    "no folder": (["nowhere"], ["nowhere", "Hub"]),
    "a model": (["unconditional/unet"], ["unet", "model_index.json"]),
    "text without a prompt": (["text"], ["is a text-to-image pipeline: pass at least one --prompt"]),
    "no arguments": ([], ["the following arguments are required: model"]),
    "flag": (["unconditional", "--step", "3"], ["unknown argument '--step' (did you mean '--steps'?)"]),
}  # fmt: skip


def test_rejects_bad_input_with_one_line(sample, classes, unconditional, text, tmp_path):
    for name, (arguments, parts) in BAD.items():
        if arguments and (tmp_path / arguments[0]).is_dir():
            arguments = [str(tmp_path / arguments[0]), *arguments[1:]]
        code, printed, errors = sample(*arguments, "--out", tmp_path / "out")
        assert (code, printed) == (2, ""), name
        (line,) = [line for line in errors.splitlines() if line.startswith("scalelong")]
        assert all(part in line for part in parts), (name, line)
        assert "Traceback" not in errors
        assert not (tmp_path / "out").exists(), name


def test_names_the_file_on_a_full_disk(error_of, unconditional, full_disk, tmp_path):
    with full_disk(0):
        line = error_of("sample", unconditional, "--out", tmp_path / "locked", "-n", 1, "--steps", 1)
    assert f"cannot lock {tmp_path / 'locked'}: [Errno 27] File too large" in line
    out = tmp_path / "out"
    for file, limit in (("sample.json", 200), ("000000.png", 700)):
        with full_disk(limit):
            line = error_of(
                "sample", unconditional, "--out", out, "-n", 1, "--steps", 1, "--height", 64, "--width", 64
            )
        assert f"{out / file} cannot be written: [Errno 27] File too large" in line


@pytest.mark.parametrize("name", ["", "unet", "scheduler"])
def test_writes_no_images_into_the_folder_of_a_model(error_of, unconditional, name):
    folder = unconditional / name
    before = sorted(folder.rglob("*"))
    line = error_of("sample", unconditional, "--out", folder, "-n", 1)
    assert f"{folder} holds a pipeline or a model: pass another --output_dir" in line
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_refuses_a_folder_that_another_process_writes_into(sample, error_of, unconditional, lock_holder, tmp_path):
    folder = tmp_path / "images"
    arguments = ("sample", unconditional, "--out", folder, "-n", 2, "--steps", 2)
    with lock_holder(folder) as process:
        assert f"{folder} is in use by process {process.pid} on " in error_of(*arguments)
    assert sample(*arguments[1:])[0] == 0
    assert sorted(path.name for path in folder.glob(".*")) == []
