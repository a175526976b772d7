"""FID and KID of a run's samples equal FID and KID of the saved pipeline, and mistakes are reported early."""

import json
import math
import signal

import numpy as np
import pytest
import torch
from accelerate import PartialState
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
from scalelong_diffusers.training.text import held_out_captions


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder that caches the statistics of references."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HOME", str(folder))
        patch.setenv("HF_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def evaluation(network, home):
    options = {"max_train_steps": 4, "num_inference_steps": 2, "validation_steps": 0, "checkpointing_steps": 2}
    return {**options, "eval_steps": 2, "num_eval_images": 10, "eval_features": network}


@pytest.fixture(scope="module")
def evaluated(train_once, evaluation, tmp_path_factory):
    """A run with FID and KID of its steps 2 and 4. Tests only read it."""
    return train_once(tmp_path_factory.mktemp("evaluated") / "run", **evaluation)


def figures_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["fid"], line["kid"]) for line in lines if "fid" in line}


def evaluate(images, network, tmp_path):
    """Return FID and KID to the 30 shapes by the public functions."""
    features = load_features(str(network))
    reference = open_reference("shapes", 8, 3, num_shapes=30)
    statistics, _ = reference_statistics(reference, features, tmp_path / "cache")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    result = evaluate_images([pixels], statistics, features)
    return pytest.approx((result["fid"], result["kid"]), rel=1e-3)


def generators():
    return [generator_for(0, "sample", k) for k in range(10)]


def test_equals_the_saved_pipeline(evaluated, network, tmp_path):
    figures = figures_of(evaluated)
    assert list(figures) == [2, 4]
    assert figures[2] != figures[4]
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(evaluated)
    images = pipe(10, num_inference_steps=2, generator=generators()).images
    assert figures[4] == evaluate(images, network, tmp_path)


def test_samples_the_classes_in_turn(train, evaluation, tiny_config, network, tmp_path):
    options = {**evaluation, "model_config_name_or_path": tiny_config / "classes"}
    folder = train(tmp_path / "run", script=train_class_conditional, **options)
    pipe = ScaleLongClassConditionalPipeline.from_pretrained(folder)
    images = pipe(list(range(10)), num_inference_steps=2, guidance_scale=2.0, generator=generators()).images
    assert figures_of(folder)[4] == evaluate(images, network, tmp_path)


def test_samples_held_out_captions(train, evaluation, tiny_config, network, tmp_path):
    options = {**evaluation, "model_config_name_or_path": tiny_config / "text"}
    folder = train(tmp_path / "run", script=train_text_to_image, **options)
    config = DataConfig(resolution=8, num_shapes=30, validation_size=3)
    data = load_training_data(config, channels=3, needs_labels=False, needs_captions=True, seed=0)
    captions = held_out_captions(data)
    assert len(captions) == 3
    pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
    prompts = [captions[k % 3] for k in range(10)]
    images = pipe(prompts, num_inference_steps=2, guidance_scale=4.0, generator=generators()).images
    assert figures_of(folder)[4] == evaluate(images, network, tmp_path)


@pytest.fixture
def change_samples(monkeypatch):
    """`change_samples(function)` changes what models return to pipelines, but not their losses."""
    forward = UViTModel.forward

    def apply(change):
        def changed(model, *args, **kwargs):
            output = forward(model, *args, **kwargs)
            if torch.is_grad_enabled() or kwargs.get("return_dict", True):
                return output
            return (change(output[0]),)

        monkeypatch.setattr(UViTModel, "forward", changed)

    return apply


@pytest.mark.parametrize("processes", [1, 2])
def test_skips_samples_that_are_not_finite(launch, evaluation, change_samples, tmp_path, processes):
    change_samples(lambda output: output * math.inf)
    options = {**evaluation, "sample_steps": 4, "train_batch_size": 4 // processes}
    code, printed, errors = launch(tmp_path / "run", processes, **options).wait()
    assert code == 0, errors
    assert printed.count("warning: step 2: no fid and kid: ") == 1
    assert printed.count("warning: step 4: no fid and kid: ") == 1
    assert printed.count("warning: step 4: no samples: ") == 1
    assert figures_of(tmp_path / "run") == {}
    assert not list((tmp_path / "run" / "samples").glob("*"))
    assert (tmp_path / "run" / "model_index.json").exists()


def test_failure_in_one_process_stops_both(launch, evaluation, change_samples, tmp_path):
    """The other process skips the metrics at the same time."""
    change_samples(
        lambda output: output * math.inf if PartialState().is_main_process else output + torch.ones(7),
    )
    code, printed, errors = launch(tmp_path / "run", 2, **{**evaluation, "train_batch_size": 2}).wait()
    assert code != 0
    assert "RuntimeError: The size of tensor" in errors
    assert "The size of tensor" in next(line for line in errors.splitlines() if line.startswith("train_unconditional"))
    assert "no fid and kid" not in printed
    assert not (tmp_path / "run" / "model_index.json").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_signal_skips_the_evaluation(launch, evaluation, tmp_path, processes):
    options = {"num_eval_images": 100_000, "eval_steps": 4, "max_train_steps": 40, "checkpointing_steps": 40}
    running = launch(tmp_path / "run", processes, **{**evaluation, **options, "train_batch_size": 4 // processes})
    running.wait_until(lambda: "FID of the samples" in running.process.read("err"))
    running.process.send_signal(signal.SIGTERM)
    code, printed, errors = running.wait()
    assert code == 128 + signal.SIGTERM
    assert "warning: step 4: no fid and kid: the run is stopping" in printed
    assert "stopped by SIGTERM after step 4 of 40" in errors
    assert (tmp_path / "run" / "checkpoint-4").is_dir()


def test_evaluation_does_not_change_training(train, evaluation, evaluated, metrics_of, tmp_path):
    plain = train(tmp_path / "plain", **{**evaluation, "eval_steps": 0})
    losses, expected = (
        [(line["loss"], line["grad_norm"]) for line in metrics_of(folder)] for folder in (evaluated, plain)
    )
    assert losses == expected


def test_resumed_run_has_the_same_metrics(train, evaluation, evaluated, stopped_at, assert_same_run):
    folder = stopped_at(2, evaluated)
    train(folder, **evaluation, resume_from_checkpoint="latest")
    assert_same_run(folder, evaluated)


def test_two_processes_share_the_images(launch, evaluation, evaluated, tmp_path):
    code, _, errors = launch(tmp_path / "two", processes=2, **{**evaluation, "train_batch_size": 2}).wait()
    assert code == 0, errors
    for step, figures in figures_of(evaluated).items():
        assert figures_of(tmp_path / "two")[step] == pytest.approx(figures, rel=1e-2)


def test_statistics_of_the_training_images_are_cached(train, evaluation, evaluated, home, tmp_path):
    (file,) = (home / "scalelong" / "statistics").iterdir()
    written = file.stat().st_mtime_ns
    by_file = train(tmp_path / "by_file", **evaluation, eval_reference=file)
    assert figures_of(by_file) == figures_of(evaluated)
    assert file.stat().st_mtime_ns == written
    assert list((home / "scalelong" / "statistics").iterdir()) == [file]


def test_reference_may_be_a_folder_with_unreadable_images(train, evaluation, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    (tmp_path / "reference").mkdir()
    for k in range(4):
        Image.new("RGB", (8, 8), (60 * k, 0, 0)).save(tmp_path / "reference" / f"{k}.png")
    (tmp_path / "reference" / "2.png").write_bytes(b"not an image")
    options = {"eval_metric": "fid, kid", "eval_reference": tmp_path / "reference", "on_bad_image": "skip"}
    folder = train(tmp_path / "run", **evaluation, **options)
    assert list(figures_of(folder)) == [2, 4]
    warning = "warning: --eval_steps: 1 of the 4 reference images are unreadable"
    assert capsys.readouterr().out.count(warning) == 1


def test_mistakes_are_reported_before_the_first_step(refused, evaluation, make_network, tmp_path):
    other_network = make_network(tmp_path / "other", hidden_size=32)
    shapes = open_reference("shapes", 16, num_shapes=5)
    features = load_features(str(evaluation["eval_features"]))
    _, larger = reference_statistics(shapes, features, tmp_path / "larger")
    _, smaller = reference_statistics(open_reference("shapes", 8, num_shapes=5), features, tmp_path / "smaller")
    rows = [
        ({"eval_metric": "fit"}, "unknown metric 'fit' (did you mean 'fid'?); accepted: fid, kid"),
        ({"num_eval_images": 1}, "--num_eval_images must be an integer, at least 2 and at most 10,000,000, got 1"),
        ({"eval_steps": -1}, "--eval_steps must be an integer, at least 0 and at most 1,000,000,000, got -1"),
        ({"eval_features": "nowhere/at-all"}, "nowhere/at-all"),
        ({"eval_reference": "no/such/folder"}, "the reference no/such/folder does not exist"),
        ({"eval_reference": "gone.safetensors"}, "gone.safetensors does not exist"),
        ({"eval_reference": larger}, "has statistics of images with 16 x 16 pixels, but these have 8 x 8"),
        (
            {"eval_reference": smaller, "eval_features": other_network},
            "the statistics of the reference have 16 ",
        ),
    ]
    for changes, message in rows:
        assert message in refused(**{**evaluation, **changes}), message


def test_cheap_checks_come_before_the_reference_is_encoded(refused, evaluation, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    assert "use a smaller batch" in refused(**{**evaluation, "train_batch_size": 100})
    assert not (tmp_path / "home").exists()
