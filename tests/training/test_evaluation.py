"""FID and KID of a run's samples: the figures of the pipeline that it saves, and what is refused before it starts."""

import json
import math
import shutil
import signal

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
    UViTModel,
)
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.evaluation import evaluate_images, load_features, open_reference, reference_statistics
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.train import train_class_conditional, train_text_to_image
from scalelong_diffusers.training import TrainingStopped, held_out_captions


SHORT = {"max_train_steps": 4, "num_inference_steps": 2, "validation_steps": 0}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Where the statistics of references are kept, by this process and those that it launches."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def evaluation(network):
    return {**SHORT, "eval_steps": 2, "num_eval_images": 10, "eval_features": network}


def figures_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["fid"], line["kid"]) for line in lines if "fid" in line}


def figures_of_pipeline(images, network, tmp_path):
    """By the public functions alone."""
    features = load_features(str(network))
    reference = open_reference("shapes", 8, 3, num_shapes=30)
    statistics, _ = reference_statistics(reference, features, tmp_path / "another home")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    result = evaluate_images([pixels], statistics, features)
    return result["fid"], result["kid"]


def test_figures_are_those_of_the_pipeline_that_is_saved(train, evaluation, network, tmp_path):
    folder = train(tmp_path / "run", **evaluation)
    figures = figures_of(folder)
    assert list(figures) == [2, 4]
    assert figures[2] != figures[4]
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    images = pipe(10, num_inference_steps=2, generator=[generator_for(0, "sample", k) for k in range(10)]).images
    assert figures[4] == pytest.approx(figures_of_pipeline(images, network, tmp_path), rel=1e-3)


def test_classes_are_taken_in_turn(train, evaluation, network, tmp_path):
    model = {"model_config_name_or_path": None, "model_type": "unet"}
    folder = train(tmp_path / "run", script=train_class_conditional, **model, **evaluation)
    pipe = ScaleLongClassConditionalPipeline.from_pretrained(folder)
    generators = [generator_for(0, "sample", k) for k in range(10)]
    images = pipe(list(range(10)), num_inference_steps=2, guidance_scale=2.0, generator=generators).images
    assert figures_of(folder)[4] == pytest.approx(figures_of_pipeline(images, network, tmp_path), rel=1e-3)


def test_a_model_of_text_draws_captions_that_were_held_out(train, evaluation, network, tmp_path):
    model = {"model_config_name_or_path": None, "model_type": "uvit"}
    folder = train(tmp_path / "run", script=train_text_to_image, **model, **evaluation)
    settings = DataConfig(resolution=8, num_shapes=30, validation_size=3)
    data = load_training_data(settings, channels=3, needs_labels=False, needs_captions=True, seed=0)
    captions = held_out_captions(data)
    assert len(captions) == 3
    pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
    prompts = [captions[k % 3] for k in range(10)]
    generators = [generator_for(0, "sample", k) for k in range(10)]
    images = pipe(prompts, num_inference_steps=2, guidance_scale=4.0, generator=generators).images
    assert figures_of(folder)[4] == pytest.approx(figures_of_pipeline(images, network, tmp_path), rel=1e-3)


@pytest.fixture
def diverged(monkeypatch):
    """All models of this package make what is not finite, though their losses are."""
    forward = UViTModel.forward

    def without_bounds(model, *args, **kwargs):
        output = forward(model, *args, **kwargs)
        return output if torch.is_grad_enabled() or kwargs.get("return_dict", True) else (output[0] * math.inf,)

    monkeypatch.setattr(UViTModel, "forward", without_bounds)


def test_of_what_is_not_finite_there_are_no_samples_and_no_figures(train, evaluation, diverged, tmp_path, capsys):
    folder = train(tmp_path / "run", **evaluation, sample_steps=4)
    assert figures_of(folder) == {}
    assert not list((folder / "samples").glob("*"))
    said = capsys.readouterr().out
    assert "warning: step 2: no fid and kid: what the model makes is not finite" in said
    assert "warning: step 4: no samples: what the model makes is not finite" in said
    assert (folder / "model_index.json").exists()


WITH_ANOTHER_OUTPUT = """
import math
import torch
from accelerate import PartialState
from scalelong_diffusers import UViTModel
from scalelong_diffusers.train.train_unconditional import main
from scalelong_diffusers.training import run_script

forward = UViTModel.forward

def another(model, *args, **kwargs):
    output = forward(model, *args, **kwargs)
    return output if torch.is_grad_enabled() or kwargs.get("return_dict", True) else (changed(output[0]),)

def changed(output):
    {changed}

UViTModel.forward = another
run_script(main)
"""


@pytest.fixture
def launch_two(launch, evaluation, tmp_path):
    """A run of two processes whose models draw what `changed`, a line of code, makes of it."""

    def run(changed):
        script = tmp_path / "script.py"
        script.write_text(WITH_ANOTHER_OUTPUT.format(changed=changed))
        settings = {**evaluation, "sample_steps": 4, "train_batch_size": 2}
        return launch(tmp_path / "run", processes=2, script=script, **settings).wait()

    return run


@pytest.mark.slow
def test_two_processes_go_on_without_what_is_not_finite(launch_two, tmp_path):
    code, said, complaint = launch_two("return output * math.inf")
    assert code == 0, complaint
    assert said.count("warning: step 4: no fid and kid: what the model makes is not finite") == 1
    assert said.count("warning: step 4: no samples: what the model makes is not finite") == 1
    assert figures_of(tmp_path / "run") == {}
    assert (tmp_path / "run" / "model_index.json").exists()


@pytest.mark.slow
def test_what_fails_in_one_process_ends_both(launch_two, tmp_path):
    """Also where the other one has left the figures out."""
    code, said, complaint = launch_two(
        "return output * math.inf if PartialState().is_main_process else output + torch.ones(7)"
    )
    assert code != 0
    assert "OtherProcessFailed: The size of tensor" in complaint
    assert "no fid and kid" not in said
    assert not (tmp_path / "run" / "model_index.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_stopped_meanwhile_does_not_make_all_images_first(launch, evaluation, tmp_path, processes):
    many = {**evaluation, "num_eval_images": 100_000, "eval_steps": 4, "max_train_steps": 40}
    launched = launch(tmp_path / "run", processes=processes, **many)
    shown = read_until(launched.process.stderr, "FID of the samples")
    for process in psutil.Process(launched.process.pid).children() if processes > 1 else [launched.process]:
        process.send_signal(signal.SIGTERM)
    code, said, complaint = launched.wait()
    assert code != 0, shown
    assert "warning: step 4: no fid and kid: the run is stopped" in said
    assert "stopped by SIGTERM after step 5 of 40" in complaint
    assert (tmp_path / "run" / "checkpoint-5").is_dir()


def read_until(stream, words):
    """A bar is drawn anew after a carriage return, so there are no lines to wait for."""
    shown = ""
    while words not in shown:
        shown += stream.read(1) or pytest.fail(shown)
    return shown


def test_figures_that_do_not_compare_are_not_mixed_in_a_log(train, refused, evaluation, tmp_path):
    folder = train(tmp_path / "run", **evaluation)
    longer = {"max_train_steps": 6, "resume_from_checkpoint": "latest"}
    with pytest.raises(TrainingStopped, match="num_eval_images was 10 and is 5"):
        train(folder, **{**evaluation, "num_eval_images": 5, **longer})
    train(folder, **{**evaluation, **longer, "eval_steps": 0, "num_eval_images": 5})
    assert list(figures_of(folder)) == [2, 4]


def test_training_goes_on_as_if_nothing_had_been_measured(train, evaluation, metrics_of, tmp_path):
    def losses(folder):
        return [(line["loss"], line["grad_norm"]) for line in metrics_of(folder)]

    measured = train(tmp_path / "measured", **evaluation)
    plain = train(tmp_path / "plain", **{**evaluation, "eval_steps": 0})
    assert losses(measured) == losses(plain)


def test_resumed_where_it_was_measured_it_is_the_same_run(train, evaluation, assert_same_run, tmp_path):
    evaluation |= {"checkpointing_steps": 2}
    expected = train(tmp_path / "expected", **evaluation)
    broken = shutil.copytree(expected, tmp_path / "broken")
    shutil.rmtree(broken / "checkpoint-4")
    train(broken, **evaluation, resume_from_checkpoint="latest")
    assert_same_run(broken, expected)


@pytest.mark.slow
def test_two_processes_share_the_images(train, launch, evaluation, tmp_path):
    alone = train(tmp_path / "alone", **evaluation)
    launched = launch(tmp_path / "two", processes=2, **{**evaluation, "train_batch_size": 2})
    code, _, complaint = launched.wait()
    assert code == 0, complaint
    for step, figures in figures_of(alone).items():
        assert figures_of(tmp_path / "two")[step] == pytest.approx(figures, rel=1e-2)


def test_statistics_of_training_images_are_kept_and_taken_again(train, evaluation, home, tmp_path):
    train(tmp_path / "run", **evaluation)
    (file,) = (home / "scalelong" / "statistics").iterdir()
    written = file.stat().st_mtime_ns
    by_file = train(tmp_path / "by_file", **evaluation, eval_reference=file)
    assert figures_of(by_file) == figures_of(tmp_path / "run")
    by_name = train(tmp_path / "by_name", **evaluation, eval_reference="shapes")
    assert figures_of(by_name) != figures_of(tmp_path / "run")  # of ten thousand shapes, not of thirty
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval_metric": "fit"}, "unknown metric 'fit' (did you mean 'fid'?); accepted: fid, kid"),
        ({"eval_metric": ""}, "no metric is given; accepted: fid, kid"),
        ({"num_eval_images": 1}, "--num_eval_images must be at least 2, got 1"),
        ({"eval_steps": -1}, "--eval_steps must be at least 0, got -1"),
        ({"eval_features": "nowhere/at-all"}, "nowhere/at-all"),
        ({"eval_reference": "no/such/folder"}, "no/such/folder: there is no such file or folder"),
        ({"eval_reference": "gone.safetensors"}, "gone.safetensors: there is no such file or folder"),
    ],
)
def test_what_can_not_be_measured_is_said_before_the_first_step(refused, evaluation, changes, sentence):
    assert sentence in refused(**{**evaluation, **changes})


def test_what_is_refused_cheaply_is_refused_before_the_reference_is_measured(refused, evaluation, home):
    assert "take a smaller batch" in refused(**{**evaluation, "train_batch_size": 100})
    assert not (home / "scalelong").exists()


def test_statistics_of_another_network_are_refused(refused, evaluation, make_network, train, home, tmp_path):
    train(tmp_path / "run", **evaluation)
    (file,) = (home / "scalelong" / "statistics").iterdir()
    other = make_network(tmp_path / "other", hidden_size=32)
    sentence = refused(**{**evaluation, "eval_features": other, "eval_reference": file})
    assert "16 of them" in sentence
    assert "32 of them" in sentence


def test_statistics_of_another_resolution_are_refused(refused, evaluation, network, tmp_path):
    shapes = open_reference("shapes", 16, num_shapes=5)
    _, file = reference_statistics(shapes, load_features(str(network)), tmp_path)
    sentence = refused(**evaluation, eval_reference=file)
    assert f"{file} has statistics of images of 16 x 16 pixels, and the images that are judged have 8 x 8" in sentence


def test_metrics_may_stand_apart_and_bad_images_are_told_of(train, evaluation, tmp_path, capsys):
    (tmp_path / "reference").mkdir()
    for k in range(4):
        Image.new("RGB", (8, 8), (60 * k, 0, 0)).save(tmp_path / "reference" / f"{k}.png")
    (tmp_path / "reference" / "2.png").write_bytes(b"no image")
    changes = {"eval_metric": "fid, kid", "eval_reference": tmp_path / "reference", "on_bad_image": "skip"}
    folder = train(tmp_path / "run", **evaluation, **changes)
    assert list(figures_of(folder)) == [2, 4]
    said = "warning: --eval_steps: 1 of the 4 reference images can not be used"
    assert capsys.readouterr().out.count(said) == 1
