"""`scalelong sample`: which images there are, what they depend on, and how it goes on after it was stopped."""

import json
import math
import os
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
    UViTModel,
)
from scalelong_diffusers.cli import main
from scalelong_diffusers.pipelines.sampling import SCHEDULERS, Sampling, scheduler_by_name
from scalelong_diffusers.randomness import generator_for


@pytest.fixture
def sample(capsys):
    """Calls `scalelong sample` in this process: its exit code, what it printed, and what it complained of."""

    def call(*arguments):
        try:
            code = main(["sample", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def uvit(seed=0, **config):
    torch.manual_seed(seed)
    config = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, **config}
    return UViTModel(**config, skip_scaling="cs").eval()


@pytest.fixture
def classes(tmp_path):
    """The folder of a pipeline of the classes cat, dog, 7 and bird."""
    names = ["cat", "dog", "7", "bird"]
    pipe = ScaleLongClassConditionalPipeline(
        uvit(num_class_embeds=5), DDIMScheduler(), class_names=names, null_class=4
    )
    pipe.save_pretrained(tmp_path / "classes")
    return tmp_path / "classes"


@pytest.fixture
def nothing(tmp_path):
    ScaleLongUnconditionalPipeline(uvit(), DDIMScheduler()).save_pretrained(tmp_path / "nothing")
    return tmp_path / "nothing"


def pixels(folder: Path, k: int | str) -> np.ndarray:
    with Image.open(folder / (f"{k:06d}.png" if isinstance(k, int) else f"{k}.png")) as image:
        return np.asarray(image).astype(int)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


FAST = ("--steps", 2)


def test_images_and_a_grid(sample, classes, tmp_path):
    out = tmp_path / "out"
    code, printed, shown = sample(
        classes, "--out", out, "-n", 5, *FAST, "--class", "cat", "bird", "--guidance", 3, "--scheduler", "dpm++"
    )
    assert code == 0
    assert printed == f"{out}: 5 images, 5 of them new, and a grid of them\n"
    assert names_in(out) == [*(f"{k:06d}.png" for k in range(5)), "grid.png", "sample.json"]
    grid = pixels(out, "grid")
    assert grid.shape == (24, 16, 3), "one column for each class"
    assert np.array_equal(grid[8:16, 8:], pixels(out, 3))
    assert "5/5 images [" in shown
    assert "<00:00]" in shown, "the time that is left"
    settings = json.loads((out / "sample.json").read_text())
    assert (settings["scheduler"], settings["steps"], settings["guidance"]) == ("dpm++", 2, 3.0)


def test_an_image_depends_on_seed_and_number_alone(sample, classes, tmp_path):
    for name, options in {
        "together": ["-n", 6, "--batch_size", 6],
        "by two": ["-n", 6, "--batch-size", 2],
        "more": ["-n", 7, "--batch_size", 4],
        "seed 1": ["-n", 2, "--seed", 1],
    }.items():
        assert sample(classes, "--out", tmp_path / name, *options, *FAST, "--guidance", 2)[0] == 0
    for k in range(6):
        image = pixels(tmp_path / "together", k)
        for name in ("by two", "more"):
            assert abs(image - pixels(tmp_path / name, k)).max() <= 1
    assert abs(pixels(tmp_path / "together", 0) - pixels(tmp_path / "seed 1", 0)).max() > 50
    assert abs(pixels(tmp_path / "together", 1) - pixels(tmp_path / "seed 1", 0)).max() > 50


def test_the_classes_are_taken_in_turn_and_are_those_of_the_pipeline(sample, classes, tmp_path):
    assert sample(classes, "--out", tmp_path / "all", "-n", 6, *FAST)[0] == 0
    assert sample(classes, "--out", tmp_path / "some", "-n", 4, *FAST, "--class", "0", "dog", "7", "3")[0] == 0
    pipe = ScaleLongClassConditionalPipeline.from_pretrained(classes)
    for k in range(4):
        drawn = pipe(k, num_inference_steps=2, generator=generator_for(0, k), output_type="np").images
        for folder in ("all", "some"):
            assert abs(pixels(tmp_path / folder, k) - (drawn[0] * 255).round()).max() <= 1, (folder, k)


def test_a_second_call_makes_only_what_is_missing(sample, nothing, tmp_path, monkeypatch):
    out = tmp_path / "out"
    sample(nothing, "--out", out, "-n", 4, *FAST)
    (out / "000002.png").unlink()
    times = {name: (out / name).stat().st_mtime_ns for name in names_in(out)}
    made = []
    make = Sampling._make_batch
    monkeypatch.setattr(Sampling, "_make_batch", lambda self, batch, bar: made.append(batch) or make(self, batch, bar))
    printed = sample(nothing, "--out", out, "-n", 6, "--batch_size", 2, *FAST)[1]
    assert printed.startswith(f"{out}: 6 images, 3 of them new")
    assert made == [[2, 4], [5]]
    assert all((out / name).stat().st_mtime_ns == time for name, time in times.items() if name[0] == "0")
    assert pixels(out, "grid").shape == (16, 24, 3)
    assert sample(nothing, "--out", out, "-n", 6, *FAST)[1].startswith(f"{out}: 6 images, 0 of them new")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_goes_on_where_it_was(sample, nothing, tmp_path, how):
    out = tmp_path / "out"
    flags = ["--out", out, "-n", 500, "--batch_size", 1, "--steps", 10]
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "sample", nothing, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True, env=env)
    while process.poll() is None and not (out / "000003.png").is_file():
        time.sleep(0.02)
    process.send_signal(how)
    complaint = process.communicate()[1]
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert complaint.endswith(f"scalelong: interrupted; the same command makes the images that {out} lacks\n")
        assert "Traceback" not in complaint
    before = [name for name in names_in(out) if name[0] == "0" and name.endswith(".png")]
    assert 4 <= len(before) < 500
    for name in before:
        Image.open(out / name).load()
    flags[3] = len(before) + 1
    code, printed, _ = sample(nothing, *flags)
    assert code == 0
    assert printed == f"{out}: {len(before) + 1} images, 1 of them new, and a grid of them\n"


def test_a_run_that_is_stopped_while_it_loads_says_the_same(sample, nothing, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("scalelong_diffusers.pipelines.load_pipeline", interrupted)
    code, _, complaint = sample(nothing, "--out", tmp_path / "out")
    assert code == 130
    assert complaint.startswith("scalelong: interrupted; ")


class TestFoldersOfOtherImages:
    def test_other_settings_are_refused_and_named(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        sample(nothing, "--out", out, "-n", 2, *FAST)
        code, _, complaint = sample(nothing, "--out", out, "-n", 2, "--steps", 3)
        assert code == 2
        assert f"{out} has images that were made with steps 2, not 3: give another --out, or delete it" in complaint

    def test_of_thousands_of_prompts_the_first_other_one_is_told(self, sample, tiny_clip, tmp_path):
        unet = uvit(cross_attention_dim=16, context_length=12)
        ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
        many = ["--prompt", *(f"circle {k}" for k in range(1000))]
        flags = ["--out", tmp_path / "out", *FAST, "-n", 1]
        assert sample(tmp_path / "text", *flags, *many)[0] == 0
        code, _, complaint = sample(tmp_path / "text", *flags, "--prompt", "a square")
        assert code == 2
        complaint = complaint.splitlines()[-1]
        assert complaint.endswith("made with prompt 0 'circle 0', not 'a square': give another --out, or delete it")

    def test_more_prompts_are_gone_on_with_where_the_images_keep_theirs(self, sample, tiny_clip, tmp_path):
        unet = uvit(cross_attention_dim=16, context_length=12)
        ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
        out = tmp_path / "out"

        def call(n, *prompts):
            return sample(tmp_path / "text", "--out", out, *FAST, "-n", n, "--prompt", *prompts)

        assert call(2, "red", "blue")[0] == 0
        assert call(3, "red", "blue", "green", "black")[1].endswith(": 3 images, 1 of them new, and a grid of them\n")
        assert call(1, "red")[1].endswith(": 1 images, 0 of them new, and a grid of them\n")
        assert json.loads((out / "sample.json").read_text())["prompt"] == ["red", "blue", "green", "black"]
        code, _, complaint = call(4, "red", "blue", "green")  # whose fourth is red again
        assert code == 2
        assert "made with prompt 3 'black', not None: give another --out" in complaint
        assert "prompt 1 'blue', not 'green'" in call(2, "red", "green")[2]

    def test_one_that_was_cut_off_is_made_again(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        assert sample(nothing, "--out", out, "-n", 3, *FAST)[0] == 0
        whole = (out / "000001.png").read_bytes()
        (out / "000001.png").write_bytes(whole[:60])
        (out / "000002.png").write_bytes(b"")
        assert ": 3 images, 2 of them new" in sample(nothing, "--out", out, "-n", 3, *FAST)[1]
        assert (out / "000001.png").read_bytes() == whole

    def test_so_are_other_weights_in_the_same_place(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        sample(nothing, "--out", out, "-n", 2, *FAST)
        ScaleLongUnconditionalPipeline(uvit(seed=1), DDIMScheduler()).save_pretrained(nothing)
        assert (
            f"has images that another unet made, that of {nothing} as"
            in sample(nothing, "--out", out, "-n", 2, *FAST)[2]
        )

    def test_so_is_another_scheduler_in_the_same_place(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        sample(nothing, "--out", out, "-n", 2, *FAST)
        DDIMScheduler(beta_end=0.03).save_pretrained(nothing / "scheduler")
        code, _, complaint = sample(nothing, "--out", out, "-n", 2, *FAST)
        assert code == 2
        assert f"{out} has images that another scheduler made, that of {nothing} as it was then" in complaint

    def test_and_another_scale_of_latents(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        sample(nothing, "--out", out, "-n", 2, *FAST)
        index = nothing / "model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "latent_scale": 0.5}))
        complaint = sample(nothing, "--out", out, "-n", 2, *FAST)[2]
        assert f"{out} has images that another pipeline made, that of {nothing} as it was then" in complaint

    def test_the_same_model_in_another_place_is_not(self, sample, tiny_clip, tmp_path):
        unet = uvit(cross_attention_dim=16, context_length=12)
        ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
        flags = ["--out", tmp_path / "out", *FAST, "--prompt", "a red circle"]
        assert sample(tmp_path / "text", "-n", 1, *flags)[0] == 0
        (tmp_path / "text").rename(tmp_path / "moved")
        code, printed, complaint = sample(tmp_path / "moved", "-n", 2, *flags)
        assert code == 0, complaint
        assert "1 of them new" in printed

    def test_a_call_that_was_refused_leaves_nothing_to_compare_with(self, sample, nothing, tmp_path):
        out = tmp_path / "out"
        assert sample(nothing, "--out", out, "-n", 1, *FAST, "--width", 13)[0] == 2
        assert sample(nothing, "--out", out, "-n", 1, *FAST, "--width", 12)[0] == 0
        assert json.loads((out / "sample.json").read_text())["width"] == 12

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            ('{"model": "x', "sample.json is not valid JSON"),
            ("[]", "sample.json is not the config of"),
            ("{}", "a sample.json that `scalelong sample` did not make"),
        ],
    )
    def test_a_damaged_or_older_note_is_refused(self, sample, nothing, tmp_path, written, message):
        out = tmp_path / "out"
        sample(nothing, "--out", out, "-n", 1, *FAST)
        (out / "sample.json").write_text(written)
        code, _, complaint = sample(nothing, "--out", out, "-n", 2, *FAST)
        assert code == 2
        assert message in complaint
        assert "Traceback" not in complaint

    def test_so_are_images_of_unknown_origin(self, sample, nothing, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "holiday.png")
        code, _, complaint = sample(nothing, "--out", tmp_path, "-n", 2, *FAST)
        assert code == 2
        assert f"{tmp_path} has images or a sample.json that `scalelong sample` did not make" in complaint

    def test_nothing_of_somebody_else_is_written_over(self, sample, nothing, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "grid.png")
        mine = {"sample.json": b'{"model": "of a camera"}', "grid.png": (tmp_path / "grid.png").read_bytes()}
        (tmp_path / "sample.json").write_bytes(mine["sample.json"])
        assert sample(nothing, "--out", tmp_path, "-n", 2, *FAST)[0] == 2
        assert {name: (tmp_path / name).read_bytes() for name in mine} == mine


class TestModels:
    def test_that_make_what_is_not_finite(self, sample, nothing, tmp_path):
        unet = uvit()
        unet.proj_out.bias.data.fill_(math.inf)
        unet.save_pretrained(nothing / "unet")
        code, _, complaint = sample(nothing, "--out", tmp_path / "out", "-n", 2, *FAST)
        assert code == 2
        assert complaint.endswith(
            "scalelong: what the model makes is not finite: it fell apart in training, or its numbers are too large "
            "for torch.float32\n"
        )
        assert not list((tmp_path / "out").glob("*.png"))

    def test_text(self, sample, tiny_clip, tmp_path):
        unet = uvit(cross_attention_dim=16, context_length=12)
        ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
        prompts = ["--prompt", "a red circle", "a circle", "--negative_prompt", "red"]
        assert sample(tmp_path / "text", "--out", tmp_path / "out", "-n", 3, *FAST, *prompts)[0] == 0
        assert abs(pixels(tmp_path / "out", 0) - pixels(tmp_path / "out", 2)).max() > 5

    def test_a_stock_pipeline(self, sample, ddpm, tmp_path):
        DDIMPipeline(ddpm.build_scaled("cs"), DDIMScheduler()).save_pretrained(tmp_path / "ddim")
        assert sample(tmp_path / "ddim", "--out", tmp_path / "out", "-n", 2, *FAST, "--dtype", "bfloat16")[0] == 0

    def test_another_size(self, sample, nothing, tmp_path):
        assert sample(nothing, "--out", tmp_path / "out", "-n", 1, *FAST, "--height", 16, "--width", 12)[0] == 0
        assert pixels(tmp_path / "out", 0).shape == (16, 12, 3)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_takes_over_the_noise_of_the_models_own(name):
    own = DDPMScheduler(beta_start=0.001, beta_end=0.01, prediction_type="v_prediction", variance_type="learned_range")
    scheduler = scheduler_by_name(name, own)
    assert (scheduler.config.beta_start, scheduler.config.beta_end) == (0.001, 0.01)
    assert scheduler.config.prediction_type == "v_prediction"
    pipe = ScaleLongUnconditionalPipeline(uvit(in_channels=4, out_channels=8), scheduler)
    pipe.set_progress_bar_config(disable=True)
    assert pipe(num_inference_steps=4, output_type="np").images.shape == (1, 8, 8, 4)


def test_a_scheduler_that_knows_no_betas_can_not_be_taken_over_from():
    with pytest.raises(ValueError, match="goes by betas, which the model's own EDMEulerScheduler has not"):
        scheduler_by_name("ddim", EDMEulerScheduler())


BAD = {
    "class": (["classes", "--class", "brd"], "unknown class 'brd' (did you mean 'bird'?); accepted: cat, dog, 7"),
    "number": (["classes", "--class", "9"], "class 9 is out of range; accepted: 0..3 (or 4, no class)"),
    "prompt for classes": (["classes", "--prompt", "a cat"], "--prompt is for models of text, and"),
    "class for nothing": (["nothing", "--class", "cat"], "--class is for models of classes, and"),
    "guidance for nothing": (["nothing", "--guidance", "3"], "--guidance is for models of classes or text, and"),
    "negative guidance": (["classes", "--guidance", "-1"], "guidance_scale must be a number of at least 0"),
    "scheduler": (["nothing", "--scheduler", "dpm+"], "unknown scheduler 'dpm+' (did you mean 'dpm++'?); accepted: "),
    "steps": (["nothing", "--steps", "0"], "steps must be at least 1, got 0"),
    "size": (["nothing", "--width", "13"], "width=13 does not fit this model, whose images are multiples of 2 pixels"),
    "n": (["nothing", "-n", "0"], "n must be at least 1, got 0"),
    "batch size": (["nothing", "--batch_size", "0"], "batch_size must be at least 1, got 0"),
    "device": (["nothing", "--device", "gpu"], "--device gpu can not be used: "),
    "dtype": (["nothing", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    "both": (["nothing", "--class", "cat", "--prompt", "x"], "argument --prompt: not allowed with argument --class"),
    "no folder": (["nowhere"], "nowhere is no local folder, and the Hub can not be reached to look for it"),
    "a model": (["nothing/unet"], "unet is no pipeline: it has no model_index.json; a pipeline is what its"),
    "nothing": ([], "the following arguments are required: model"),
    "flag": (["nothing", "--step", "3"], "unknown argument '--step' (did you mean '--steps'?)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(sample, name, classes, nothing, tmp_path):
    arguments, message = BAD[name]
    if arguments and (tmp_path / arguments[0]).is_dir():
        arguments = [str(tmp_path / arguments[0]), *arguments[1:]]
    code, printed, complaint = sample(*arguments, "--out", tmp_path / "out")
    assert (code, printed) == (2, "")
    (line,) = [line for line in complaint.splitlines() if line.startswith("scalelong")]
    assert message in line
    assert "Traceback" not in complaint
    assert not list(tmp_path.glob("out/*.png"))


def test_text_without_a_prompt(sample, tiny_clip, tmp_path):
    unet = uvit(cross_attention_dim=16, context_length=12)
    ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
    code, _, complaint = sample(tmp_path / "text", "--out", tmp_path / "out")
    assert code == 2
    assert "is a model of text: give at least one --prompt" in complaint
