"""`scalelong evaluate` rejects bad input with one line and exit code 2, before it makes images."""

import json
import sys

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from transformers import (
    VideoMAEConfig,
    VideoMAEModel,
    ViTImageProcessorPil,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from scalelong_diffusers import ScaleLongClassConditionalPipeline, ScaleLongUnconditionalPipeline, UViTModel


@pytest.fixture
def error_of(evaluate, tmp_path):
    """Run `scalelong evaluate` and return its one-line error."""

    def call(*arguments, **options):
        results = sorted(tmp_path.glob("**/evaluation.jsonl"))
        code, printed, errors = evaluate(*arguments, **options)
        assert (code, printed) == (2, ""), errors
        assert "Traceback" not in errors
        assert sorted(tmp_path.glob("**/evaluation.jsonl")) == results
        (line,) = [line for line in errors.splitlines() if line.startswith("scalelong")]
        return line

    return call


def test_model_with_a_name_that_is_too_long(error_of):
    assert "is neither a local folder nor a Hub repository" in error_of("9" * 300)


class TestReference:
    def test_that_does_not_exist(self, error_of, pictures):
        for reference in ("no/such/folder", "./none", "none.npz"):
            line = error_of(pictures(3), reference=reference)
            assert f"the reference {reference} does not exist; accepted: a file of statistics" in line

    def test_that_is_not_on_the_hub(self, error_of, pictures):
        line = error_of(pictures(3), reference="nobody/nothing")
        assert "cannot load the dataset nobody/nothing: " in line

    def test_num_shapes_of_another_dataset(self, error_of, pictures):
        line = error_of(pictures(3), "--num_shapes", 5, reference=pictures(3, "data"))
        assert "--num_shapes needs the built-in dataset 'shapes', and the reference is " in line

    def test_that_is_empty(self, error_of, pictures, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "folder empty" in error_of(pictures(3), reference=tmp_path / "empty")

    def test_with_a_cache_folder_that_is_a_file(self, evaluate, pictures, tmp_path):
        (tmp_path / "file").write_text("words")
        code, printed, errors = evaluate(pictures(3), "--num_shapes", 20, cache_dir=tmp_path / "file")
        assert code == 0
        assert printed.startswith("FID ")
        assert "warning: the statistics of the reference cannot be saved: " in errors

    def test_of_one_image(self, error_of, pictures):
        assert "at least two images, got 1" in error_of(pictures(3), reference=pictures(1, "one"))

    def test_without_the_split(self, error_of, pictures):
        line = error_of(pictures(3), "--split", "validation", reference=pictures(3, "data"))
        assert "has no validation split; use its split train" in line

    def test_with_an_unreadable_image(self, error_of, pictures):
        reference = pictures(3, "data")
        (reference / "001.png").write_bytes(b"not an image")
        line = error_of(pictures(3), reference=reference)
        assert "001.png" in line
        assert "on_bad_image" in line

    def test_in_color_for_gray_images(self, error_of, pictures):
        line = error_of(pictures(3, mode="L"), reference=pictures(3, "data"))
        assert "the evaluated images are gray, but " in line
        assert ".png of the reference is in color" in line

    def test_for_images_that_are_not_square(self, error_of, pictures):
        line = error_of(pictures(3, size=(8, 6)))
        assert "the images have 8 x 6 pixels, but a dataset is cropped to squares" in line

    def test_with_images_smaller_than_the_crop(self, error_of, pictures):
        line = error_of(pictures(3), "--crop_size", 20, reference=pictures(3, "data"))
        assert "8 x 8 pixels" in line
        assert "crop_size" in line


class TestStatistics:
    @pytest.fixture
    def saved(self, measured, pictures):
        return measured(pictures(5), "--num_shapes", 20)["statistics"]

    def test_of_another_network(self, error_of, saved, pictures, make_network, tmp_path):
        line = error_of(pictures(3), reference=saved, features=make_network(tmp_path / "other", hidden_size=8))
        assert "but the feature network has 8 features of 'other' (" in line
        assert "the statistics of the reference have 16 features of 'tiny-vit' (" in line

    def test_of_inception_with_another_network(self, error_of, pictures, tmp_path):
        np.savez(tmp_path / "published.npz", mu=np.zeros(2048), sigma=np.eye(2048))
        line = error_of(pictures(3), "--metric", "fid", reference=tmp_path / "published.npz")
        assert "have 2,048 features of 'inception'" in line
        assert "but the feature network has 16 features of 'tiny-vit'" in line
        line = error_of(pictures(3), reference=tmp_path / "published.npz")
        assert "KID needs features, and these statistics have only a mean and covariance: use fid instead" in line

    def test_of_another_size(self, error_of, saved, pictures):
        line = error_of(pictures(3, "large", size=(16, 16)), reference=saved)
        assert "has statistics of images with 8 x 8 pixels, but these have 16 x 16" in line

    def test_with_flags_for_datasets(self, error_of, saved, pictures):
        line = error_of(pictures(3), "--crop_size", 8, reference=saved)
        assert f"--crop_size needs a dataset, and the reference is {saved}" in line

    def test_npz_of_another_network(self, error_of, pictures, tmp_path):
        np.savez(tmp_path / "other.npz", mu=np.zeros(64), sigma=np.eye(64))
        line = error_of(pictures(3), "--metric", "fid", reference=tmp_path / "other.npz")
        assert "the statistics of the reference have 64 features of 'inception'" in line

    def test_that_are_damaged(self, error_of, pictures, tmp_path):
        (tmp_path / "broken.npz").write_text("not an archive")
        assert "broken.npz cannot be read as a file of statistics" in error_of(
            pictures(3), reference=tmp_path / "broken.npz"
        )


class TestImages:
    def test_fewer_than_requested(self, error_of, pictures):
        assert "--num_images 5 is more than the 3 images in " in error_of(pictures(3), num_images=5)

    def test_fewer_than_two(self, error_of, pictures):
        for n in (1, 0, -3):
            line = error_of(pictures(3), num_images=n)
            assert f"num_images must be an integer, at least 2 and at most 10,000,000, got {n}" in line

    def test_folder_of_one(self, error_of, pictures):
        assert "a covariance needs at least two images, got 1" in error_of(pictures(1), "--num_shapes", 20)

    def test_empty_folder(self, error_of, tmp_path):
        (tmp_path / "nothing").mkdir()
        line = error_of(tmp_path / "nothing")
        assert line.endswith("nothing is not a pipeline (no model_index.json) and has no images")

    def test_a_model_without_its_pipeline(self, error_of, pipeline):
        assert "is not a pipeline (no model_index.json) and has no images" in error_of(pipeline / "unet")

    def test_missing_sample(self, error_of, measured, pipeline, tmp_path):
        out = tmp_path / "out"
        measured(pipeline, "--num_shapes", 20, "--steps", 1, num_images=5, output_dir=out)
        Image.new("RGB", (8, 8)).save(out / "other.png")
        assert measured(out, "--num_shapes", 20)["n"] == 5, "other files are not samples"
        complete = (out / "000003.png").read_bytes()
        (out / "000003.png").write_bytes(complete[:60])
        assert f"{out / '000003.png'} cannot be read: " in error_of(out, "--num_shapes", 20)
        (out / "000003.png").unlink()
        assert f"{out / '000003.png'} cannot be read: [Errno 2] No such file" in error_of(out, "--num_shapes", 20)
        measured(out, "--num_shapes", 20, num_images=3)

    def test_prompts_for_an_unconditional_pipeline(self, error_of, pipeline, tmp_path):
        assert "none.txt does not exist or is empty" in error_of(pipeline, prompt_file=tmp_path / "none.txt")
        (tmp_path / "latin1.txt").write_bytes("Köln".encode("latin1"))
        assert "latin1.txt is not UTF-8 text" in error_of(pipeline, prompt_file=tmp_path / "latin1.txt")
        kind = "ScaleLongUnconditionalPipeline"
        (tmp_path / "some.txt").write_text("red\n")
        line = error_of(pipeline, "--num_shapes", 20, prompt_file=tmp_path / "some.txt")
        assert f"--prompt needs a text-to-image pipeline, and {pipeline} is a {kind}" in line
        line = error_of(pipeline, "--prompt", "red", prompts=tmp_path / "some.txt")
        assert "--prompt and --prompt_file are both given" in line
        line = error_of(pipeline, "--prompt", "red", "--num_shapes", 20)
        assert f"--prompt needs a text-to-image pipeline, and {pipeline} is a {kind}" in line

    def test_of_several_sizes(self, error_of, pictures):
        folder = pictures(3)
        Image.new("RGB", (9, 8)).save(folder / "999.png")
        assert "999.png (9 x 8 pixels) must have the size of " in error_of(folder, "--num_shapes", 20)

    def test_unreadable_image(self, error_of, pictures):
        folder = pictures(3)
        (folder / "001.png").write_bytes(b"not an image")
        line = error_of(folder, "--num_shapes", 20)
        assert "001.png cannot be read: " in line
        assert "skip" not in line, "evaluated images are never skipped"

    def test_long_sample_json_of_another_program(self, error_of, pictures):
        folder = pictures(3)
        (folder / "sample.json").write_text(json.dumps(["a caption"] * 1000))
        line = error_of(folder, "--num_shapes", 20)
        assert "sample.json" in line
        assert "['a caption'" in line
        assert len(line) < 500

    def test_sampling_flags_for_a_folder(self, error_of, pictures):
        folder = pictures(3)
        for flag, name in (("--steps", "num_inference_steps"), ("--out", "output_dir"), ("--dtype", "dtype")):
            line = error_of(folder, flag, "float16" if name == "dtype" else 3)
            assert f"--{name} needs a pipeline, and {folder} is not one: it has no model_index.json" in line

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--scheduler", "ddmi"], "unipc, got 'ddmi' (did you mean 'ddpm'?)"),
            (["--class", "nosuch"], "--class_labels needs a class-conditional pipeline, and "),
            (["--steps", 0], "num_inference_steps must be an integer, at least 1 and at most 10,000, got 0"),
            (
                [],
                "has images or a sample.json that this version of `scalelong sample` did not make: pass another --out",
            ),
        ],
    )
    def test_checks_sampling_before_it_reads_the_reference(
        self, error_of, pipeline, pictures, flags, message, tmp_path
    ):
        out = tmp_path / "out" if flags else pictures(3)
        assert message in error_of(pipeline, *flags, "--num_shapes", 20, num_images=2, output_dir=out)
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_checks_the_folder_before_it_reads_the_reference(self, error_of, pipeline, tmp_path):
        (tmp_path / "file").write_text("words")
        line = error_of(pipeline, "--num_shapes", 20, num_images=2, output_dir=tmp_path / "file" / "out")
        assert f"/out cannot be a folder, because {tmp_path / 'file'} is a file: pass another --output_dir" in line
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_rejects_an_output_folder_inside_the_reference(self, error_of, pipeline, pictures):
        folder = pictures(3)
        line = error_of(pipeline, reference=folder, num_images=2, output_dir=folder / "out")
        assert f"--output_dir {folder / 'out'} is inside the data folder {folder}, and its files would be" in line
        assert not (folder / "out").exists()

    def test_writes_no_images_into_the_folder_of_the_pipeline(self, error_of, pipeline, tmp_path):
        for folder in (pipeline, pipeline / "unet"):
            line = error_of(pipeline, "--num_shapes", 20, num_images=2, output_dir=folder)
            assert f"{folder} holds a pipeline or a model: pass another --output_dir" in line
            assert not list(folder.glob("*.png"))
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_unfinished_run(self, error_of, tmp_path):
        (tmp_path / "run" / "samples").mkdir(parents=True)
        for step in (1, 2):
            Image.new("RGB", (8, 8)).save(tmp_path / "run" / "samples" / f"step-{step}.png")
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        line = error_of(tmp_path / "run", "--num_shapes", 20)
        assert "and has no images; resume this unfinished training run with" in line

    def test_checks_guidance_before_it_reads_the_reference(self, error_of, tmp_path):
        unet = UViTModel(
            sample_size=8, patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2, num_class_embeds=2
        )
        ScaleLongClassConditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "classes")
        flags = ["--num_shapes", 20, "--num_images", 2, "--output_dir", tmp_path / "out"]
        line = error_of(tmp_path / "classes", "--guidance_scale", -1, *flags)
        assert "guidance_scale must be a number, at least 0 and at most 1,000, got -1.0" in line
        assert "guidance_scale" in error_of(tmp_path / "classes", "--guidance_scale", 3, *flags)
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_missing_model(self, error_of):
        line = error_of("nobody/nothing")
        assert "nobody/nothing" in line
        assert "Hub" in line

    def test_pipeline_of_rectangles(self, error_of, tmp_path):
        unet = UViTModel(sample_size=(8, 4), patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2)
        ScaleLongUnconditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "wide")
        assert "the images have 4 x 8 pixels" in error_of(tmp_path / "wide")

    def test_another_seed_for_the_same_folder(self, measured, evaluate, pipeline, tmp_path):
        flags = ["--steps", 1, "--num_shapes", 20]
        measured(pipeline, *flags, num_images=2, output_dir=tmp_path / "out")
        code, _, errors = evaluate(pipeline, *flags, "--seed", 1, num_images=2, output_dir=tmp_path / "out")
        assert code == 2
        assert "made with seed 0, not 1: pass another --output_dir, or delete it" in errors


class TestMetricsAndFeatures:
    def test_misspelled_metric(self, error_of, pictures):
        line = error_of(pictures(3), "--metric", "fid,kdi")
        assert "unknown metric 'kdi' (did you mean 'kid'?); accepted: fid, kid" in line
        assert "unknown metric ','" in error_of(pictures(3), "--metric", ",")

    def test_missing_image_processor(self, error_of, pictures, network, tmp_path):
        ViTModel.from_pretrained(network).save_pretrained(tmp_path / "bare")
        line = error_of(pictures(3), features=tmp_path / "bare")
        assert "bare cannot be loaded" in line
        assert "preprocessor_config.json" in line

    def test_pipeline_as_network(self, error_of, pictures, pipeline):
        line = error_of(pictures(3), features=pipeline)
        assert f"{pipeline} cannot be loaded: OSError: Can't load image processor" in line

    def test_random_network(self, error_of, pictures, tmp_path):
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        decoder = {f"decoder_{name}": value for name, value in size.items()}
        network = tmp_path / "masked"
        ViTMAEModel(ViTMAEConfig(image_size=8, patch_size=2, **size, **decoder)).save_pretrained(network)
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(network)
        line = error_of(pictures(3), features=network)
        assert "masked gives different features for the same image: ViTMAEModel is random" in line

    def test_network_for_videos(self, error_of, pictures, tmp_path):
        network = tmp_path / "film"
        VideoMAEModel(
            VideoMAEConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        ).save_pretrained(network)
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(network)
        line = error_of(pictures(3), features=network)
        assert "film has no image features: VideoMAEModel fails with " in line

    def test_inception_without_its_package(self, error_of, pictures, monkeypatch):
        monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
        line = error_of(pictures(3), features=None)
        assert "the Inception network needs torch-fidelity: pip install torch-fidelity" in line

    def test_without_torchmetrics(self, error_of, pictures, monkeypatch):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "torchmetrics", None)  # Python then raises ModuleNotFoundError
        line = error_of(pictures(3))
        assert "KID needs torchmetrics" in line
        assert ": pip install 'scalelong-diffusers[evaluate]'" in line

    def test_without_torchvision(self, error_of, pictures, monkeypatch):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
            monkeypatch.delitem(sys.modules, name)

        class Finder:
            def find_spec(self, name, *arguments):
                if name == "torchmetrics":
                    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        assert "KID needs torchvision: pip install torchvision" in error_of(pictures(3))

    def test_missing_device(self, error_of, pictures):
        assert "--device cuda:7 cannot be used" in error_of(pictures(3), device="cuda:7")

    def test_misspelled_flag(self, error_of, pictures):
        line = error_of(pictures(3), "--metrics", "fid")
        assert "unknown argument '--metrics' (did you mean '--metric'?) (scalelong evaluate --help lists" in line


def test_prints_only_json(evaluate, pictures):
    code, printed, _ = evaluate(pictures(3), "--json", "--num_shapes", 20)
    assert code == 0
    assert json.loads(printed)["n"] == 3
    assert torch.isfinite(torch.tensor(json.loads(printed)["fid"]))
