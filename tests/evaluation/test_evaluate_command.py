"""`scalelong evaluate`: its result, its reference, and how it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from safetensors import SafetensorError

from scalelong_diffusers import ScaleLongTextToImagePipeline, UViTModel
from scalelong_diffusers.cli import main
from scalelong_diffusers.data.images import fixed_permutation
from scalelong_diffusers.evaluation import (
    FeatureStatistics,
    ImageFiles,
    evaluate_images,
    open_reference,
    reference_statistics,
)


FAST = ("--num_inference_steps", 2, "--num_images", 12, "--batch_size", 5, "--num_shapes", 20)


class TestResult:
    def test_of_a_pipeline(self, measured, pipeline, extractor, tmp_path):
        result = measured(pipeline, *FAST, "--seed", 3, "--scheduler", "euler", output_dir=tmp_path / "out")
        assert json.loads((tmp_path / "out" / "evaluation.jsonl").read_text()) == result
        assert result["fid"] > 0
        assert {"kid", "kid_std"} <= set(result)
        expected = {
            "n": 12, "model": str(pipeline), "sampler": "EulerDiscreteScheduler",
            "num_inference_steps": 2, "guidance_scale": None,
            "seed": 3, "ema": None, "dtype": "float32", "resolution": [8, 8], "reference": "shapes",
            "reference_n": 20, "split": "train", "features": "tiny-vit", "num_features": 16,
            "features_fingerprint": extractor.fingerprint,
        }  # fmt: skip
        assert {name: result[name] for name in expected} == expected
        assert result["versions"]["torchmetrics"] == version("torchmetrics")
        assert len(result["warnings"]) == 2

    def test_is_printed_in_one_line_with_separate_warnings(self, evaluate, pipeline, tmp_path):
        (pipeline / "settings.json").write_text('{"use_ema": true}')
        code, printed, errors = evaluate(pipeline, *FAST, output_dir=tmp_path / "out")
        assert code == 0
        assert printed.startswith("FID ")
        assert printed.count("\n") == 1
        for part in (
            "KID",
            "n 12",
            "sampler DDIMScheduler",
            "steps 2",
            "seed 0",
            "EMA yes",
            "features tiny-vit (16, ",
        ):
            assert part in printed
        assert "scalelong: warning: this FID means little: with 12 images for 16 features" in errors

    def test_of_a_folder_equals_the_result_of_its_pipeline(self, measured, pipeline, tmp_path):
        out = tmp_path / "out"
        made = measured(pipeline, *FAST, "--seed", 3, output_dir=out)
        again = measured(out, "--num_shapes", 20)
        assert again["n"] == 12, "the grid is not an image to evaluate"
        same = ("sampler", "num_inference_steps", "guidance_scale", "seed", "dtype", "model", "ema")
        assert {name: again[name] for name in same} == {name: made[name] for name in same}
        assert again["fid"] == pytest.approx(made["fid"], rel=1e-6)
        assert again["kid"] == pytest.approx(made["kid"], rel=1e-6)
        assert measured(out, "--num_shapes", 20, "--num_images", 7)["n"] == 7

    def test_is_0_between_samples_and_themselves(self, measured, pipeline, tmp_path, capsys):
        out = tmp_path / "out"
        assert main(["sample", str(pipeline), "--output_dir", str(out), "-n", "5", "--steps", "1"]) == 0
        capsys.readouterr()
        assert (out / "grid.png").is_file()
        result = measured(out, reference=out)
        assert (result["n"], result["reference_n"]) == (5, 5)
        assert abs(result["fid"]) < 1e-6

    def test_warns_if_statistics_cannot_be_saved(self, evaluate, pictures, monkeypatch):
        def fill_the_disk(*arguments):
            raise SafetensorError("I/O error: No space left on device")

        monkeypatch.setattr("scalelong_diffusers.evaluation.metrics.save_file", fill_the_disk)
        code, printed, errors = evaluate(pictures(3), "--json", "--num_shapes", 20)
        assert code == 0
        assert json.loads(printed)["statistics"] is None
        assert ".safetensors cannot be written: I/O error: No space left on device" in errors

    def test_ignores_a_foreign_settings_json(self, measured, pipeline, tmp_path):
        (pipeline / "settings.json").write_text("[]")
        assert measured(pipeline, *FAST, output_dir=tmp_path / "out")["ema"] is None

    def test_is_appended_to_earlier_results(self, measured, pictures):
        folder = pictures(5)
        results = [measured(folder, "--num_shapes", 20, "--num_images", n) for n in (5, 3)]
        assert list(map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines())) == results

    def test_is_printed_if_it_cannot_be_written(self, measured, pictures):
        folder = pictures(3)
        (folder / "evaluation.jsonl").mkdir()
        result = measured(folder, "--num_shapes", 20)
        assert result["fid"] > 0
        assert result["warnings"][-1].startswith("the result cannot be written: [Errno ")

    def test_is_0_between_images_and_themselves(self, measured, pictures):
        folder = pictures(40)
        assert abs(measured(folder, reference=folder)["fid"]) < 1e-6
        assert measured(pictures(40, "darker", seed=1, low=200), reference=folder)["fid"] > 1e-3

    def test_has_only_the_requested_metrics(self, measured, pictures):
        result = measured(pictures(5), "--metric", "fid", "--num_shapes", 20)
        assert "kid" not in result

    def test_of_gray_images(self, measured, pictures):
        gray = pictures(20, "gray", mode="L")
        assert abs(measured(gray, reference=gray)["fid"]) < 1e-6

    def test_of_gray_images_among_color_images(self, measured, pictures):
        folder = pictures(20)
        pictures(1, mode="L")  # replaces the first
        assert abs(measured(folder, reference=folder)["fid"]) < 1e-6

    def test_ignores_hidden_files(self, measured, pictures):
        folder = pictures(5)
        (folder / "._001.png").write_bytes(b"metadata that macOS writes")
        (folder / ".ipynb_checkpoints").mkdir()
        Image.new("RGB", (8, 8)).save(folder / ".ipynb_checkpoints" / "001-checkpoint.png")
        assert measured(folder, "--num_shapes", 20)["n"] == 5

    def test_ignores_a_foreign_sample_json(self, measured, pictures):
        folder = pictures(5)
        (folder / "sample.json").write_text('{"model": "of a camera"}')
        result = measured(folder, "--num_shapes", 20)
        assert result["n"] == 5
        assert "model" not in result

    def test_of_text_to_image_uses_the_captions_of_the_reference(self, measured, tiny_clip, tmp_path):
        torch.manual_seed(0)
        unet = UViTModel(
            sample_size=8, patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2, cross_attention_dim=16,
            context_length=12,
        )  # fmt: skip
        ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path / "text")
        out = tmp_path / "out"
        flags = ["--steps", 1, "--num_images", 3, "--num_shapes", 20]
        result = measured(tmp_path / "text", *flags, output_dir=out)
        assert result["guidance_scale"] == 7.5, "the pipeline's default"
        prompts = json.loads((out / "sample.json").read_text())["prompt"]
        assert len(set(prompts)) == 3
        assert {prompt.split()[1] for prompt in prompts} != {"red"}, "the first five shapes are all red"
        (out / "000001.png").unlink()
        assert measured(tmp_path / "text", *flags, output_dir=out)["fid"] == pytest.approx(result["fid"], rel=1e-3)
        (tmp_path / "prompts.txt").write_text("red\n\ncircle\n")
        for name, given in (
            ("file", ["--prompt_file", tmp_path / "prompts.txt"]),
            ("list", ["--prompt", "red", "circle"]),
        ):
            measured(tmp_path / "text", *flags, *given, "--guidance_scale", 1, output_dir=tmp_path / name)
            assert json.loads((tmp_path / name / "sample.json").read_text())["prompt"] == ["red", "circle"]


class TestImageFiles:
    def test_first_images_of_a_folder_are_of_all_classes(self, pictures):
        for name in ("cat", "dog"):
            pictures(20, f"pictures/{name}")
        images = ImageFiles.of_folder(pictures(0), n=10)
        assert {file.parent.name for file in images.files} == {"cat", "dog"}
        assert images.files == ImageFiles.of_folder(pictures(0), n=20).files[:10], "the same files each time"

    def test_first_samples_have_the_lowest_numbers(self, evaluate, pipeline, tmp_path):
        evaluate(pipeline, *FAST, output_dir=tmp_path / "out")
        images = ImageFiles.of_folder(tmp_path / "out", n=5)
        assert [file.name for file in images.files] == [f"{k:06d}.png" for k in range(5)]


class TestReference:
    def test_warns_each_time_about_unreadable_images(self, measured, pictures):
        reference = pictures(3, "reference")
        for k in (0, 1):
            (reference / f"{k:03d}.png").write_bytes(b"not an image")
        for _ in range(2):  # the second time from the cache
            warnings = measured(pictures(3), on_bad_image="skip", reference=reference)["warnings"]
            assert "2 of the 3 reference images are unreadable: others replace them" in warnings[-1]

    def test_is_computed_once(self, evaluate, pictures, tmp_path):
        folder, reference = pictures(5), pictures(20, "reference", seed=1)
        first, again = evaluate(folder, reference=reference), evaluate(folder, reference=reference)
        assert "features of the reference" in first[2]
        assert "features of the reference" not in again[2]
        assert again[1] == first[1]
        assert len(list((tmp_path / "cache" / "statistics").iterdir())) == 1

    def test_is_recomputed_for_other_images_transforms_and_networks(self, measured, pictures, make_network, tmp_path):
        folder, reference = pictures(5), pictures(20, "reference", seed=1, size=(16, 12))
        other_network = make_network(tmp_path / "other", hidden_size=8)
        calls = [
            {},
            {"crop_size": 8},
            {"image_interpolation_mode": "box"},
            {"features": other_network},
        ]
        files = [measured(folder, reference=reference, **options)["statistics"] for options in calls]
        pictures(21, "reference", seed=1, size=(16, 12))
        files.append(measured(folder, reference=reference)["statistics"])
        assert len(set(files)) == 5

    def test_can_be_a_saved_file(self, measured, pictures, tmp_path):
        folder = pictures(5)
        first = measured(folder, "--num_shapes", 20)
        os.rename(first["statistics"], tmp_path / "shapes.safetensors")
        again = measured(folder, reference=tmp_path / "shapes.safetensors")
        same = ("fid", "kid", "split", "reference_n", "reference_description", "interpolation")
        assert {name: again[name] for name in same} == {name: first[name] for name in same}

    def test_can_be_a_validation_split(self, measured, pictures, tmp_path):
        pictures(4, "data")
        for split, n in (("train", 6), ("test", 4)):
            (tmp_path / "data" / split).mkdir()
            for file in list(pictures(n, split + "-made", seed=n).iterdir()):
                file.rename(tmp_path / "data" / split / file.name)
        for file in (tmp_path / "data").glob("*.png"):
            file.unlink()
        folder = pictures(5)
        sizes = {
            split: measured(folder, "--split", split, reference=tmp_path / "data")["reference_n"]
            for split in ("train", "validation")
        }
        assert sizes == {"train": 6, "validation": 4}


def test_evaluates_images_in_memory(extractor, tmp_path):
    reference = open_reference("shapes", resolution=8, num_shapes=100)
    statistics, file = reference_statistics(reference, extractor, tmp_path)
    assert torch.equal(FeatureStatistics.load(file).covariance, statistics.covariance)
    same = evaluate_images(reference.batches(32), statistics, extractor)
    assert abs(same["fid"]) < 1e-6
    inverted = evaluate_images((255 - batch for batch in reference.batches(32)), statistics, extractor, ["fid"])
    assert set(inverted) == {"fid", "n", "warnings"}
    assert inverted["fid"] > 0.01


def finished(command, env, timeout=120):
    """Run a launch and return its exit code, stdout and stderr. Its processes end with it."""
    process = subprocess.Popen(
        [str(word) for word in command], env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed, errors


class TestResume:
    def test_keeps_existing_images(self, measured, pipeline, tmp_path):
        out = tmp_path / "out"
        first = measured(pipeline, *FAST, output_dir=out)
        (out / "000004.png").unlink()
        times = {file: file.stat().st_mtime_ns for file in out.glob("0*.png")}
        assert measured(pipeline, *FAST, output_dir=out)["fid"] == pytest.approx(first["fid"], rel=1e-3)
        assert {file: file.stat().st_mtime_ns for file in times} == times

    @pytest.mark.slow
    def test_explains_how_to_resume_if_interrupted(self, pipeline, network, tmp_path):
        command = [
            *(sys.executable, "-m", "scalelong_diffusers.cli", "evaluate", pipeline, "--features", network),
            *("--reference", "shapes", "--num_shapes", 20, "-n", 5000, "--batch_size", 1, "--out", tmp_path / "out"),
            *("--cache_dir", tmp_path / "cache"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True, env=env)
        while process.poll() is None and not (tmp_path / "out" / "000003.png").is_file():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1].startswith("scalelong: interrupted; run the same command again")
        assert "Traceback" not in errors
        Image.open(tmp_path / "out" / "000003.png").load()

    @pytest.mark.slow
    def test_two_processes_give_the_same_result(self, measured, pipeline, network, tmp_path):
        flags = [*FAST, "--reference", "shapes", "--features", network, "--json"]
        alone = measured(pipeline, *FAST, output_dir=tmp_path / "alone")
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m"]
        command = [sys.executable, *launch, "scalelong_diffusers.cli", "evaluate", pipeline, *flags]
        command += ["--out", tmp_path / "two", "--cache_dir", tmp_path / "other_cache"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONWARNINGS": "ignore"}
        code, printed, errors = finished(command, env)
        assert code == 0, errors
        together = json.loads(printed)
        assert sorted(file.name for file in (tmp_path / "two").iterdir()) == sorted(
            file.name for file in (tmp_path / "alone").iterdir()
        )
        assert together["n"] == 12
        assert together["reference_n"] == 20
        assert together["fid"] == pytest.approx(alone["fid"], rel=1e-3)
        assert together["kid"] == pytest.approx(alone["kid"], rel=1e-3)

    @pytest.mark.slow
    def test_all_processes_report_an_image_that_one_cannot_read(self, pictures, network, tmp_path):
        reference = pictures(4, "data")
        broken = reference / f"{fixed_permutation(4)[1]:03d}.png"  # the first of the second process
        broken.write_bytes(b"not an image")
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m"]
        command = [sys.executable, *launch, "scalelong_diffusers.cli", "evaluate", pictures(4), "--batch_size", 1]
        command += ["--reference", reference, "--features", network, "--cache_dir", tmp_path / "cache"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONWARNINGS": "ignore"}
        code, _, errors = finished(command, env)
        assert code != 0
        assert errors.count(f"scalelong: {broken} ") == 2, errors
        assert "gloo" not in errors
