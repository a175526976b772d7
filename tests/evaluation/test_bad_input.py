"""What is asked wrongly ends in one line that names it, and exit code 2, before images are made."""

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
def refused(evaluate, tmp_path):
    """The one line."""

    def call(*arguments, **options):
        results = sorted(tmp_path.glob("**/evaluation.jsonl"))
        code, printed, complaint = evaluate(*arguments, **options)
        assert (code, printed) == (2, ""), complaint
        assert "Traceback" not in complaint
        assert sorted(tmp_path.glob("**/evaluation.jsonl")) == results
        (line,) = [line for line in complaint.splitlines() if line.startswith("scalelong")]
        return line

    return call


class TestReference:
    @pytest.mark.parametrize("reference", ["no/such/folder", "./none", "none.npz"])
    def test_that_is_not_there(self, refused, pictures, reference):
        line = refused(pictures(3), reference=reference)
        assert f"the reference {reference}: there is no such file or folder" in line

    def test_that_is_not_on_the_hub(self, refused, pictures):
        line = refused(pictures(3), reference="nobody/nothing")
        assert "the reference nobody/nothing is no local folder" in line
        assert "as a data set on the Hub it can not be had" in line

    def test_that_is_misspelt(self, refused, pictures):
        assert "the reference shape (did you mean 'shapes'?) is no local folder" in refused(
            pictures(3), reference="shape"
        )

    def test_that_is_no_built_in_set_has_no_number_of_shapes(self, refused, pictures):
        line = refused(pictures(3), "--num_shapes", 5, reference=pictures(3, "data"))
        assert "--num_shapes is for the built-in set, 'shapes', and the reference is " in line

    def test_that_is_empty(self, refused, pictures, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "it holds no images" in refused(pictures(3), reference=tmp_path / "empty")

    def test_of_one_image(self, refused, pictures):
        assert "there must be two at least" in refused(pictures(3), reference=pictures(1, "one"))

    def test_without_the_split(self, refused, pictures):
        line = refused(pictures(3), "--split", "validation", reference=pictures(3, "data"))
        assert "has no split for validation" in line

    def test_with_a_file_that_is_no_image(self, refused, pictures):
        reference = pictures(3, "data")
        (reference / "001.png").write_bytes(b"no image")
        line = refused(pictures(3), reference=reference)
        assert "001.png can not be read" in line
        assert "on_bad_image='skip'" in line

    def test_in_colour_for_grey_images(self, refused, pictures):
        line = refused(pictures(3, mode="L"), reference=pictures(3, "data"))
        assert "the images that are judged are grey, and " in line
        assert "of the reference is not" in line

    def test_for_images_that_are_no_squares(self, refused, pictures):
        line = refused(pictures(3, size=(8, 6)))
        assert "the images have 8 x 6 pixels, and those of a data set are cut to squares" in line

    def test_smaller_than_what_is_cut_out(self, refused, pictures):
        line = refused(pictures(3), "--crop_size", 20, reference=pictures(3, "data"))
        assert "it has 8 x 8 pixels, and crop_size is 20" in line


class TestStatistics:
    @pytest.fixture
    def kept(self, measured, pictures):
        return measured(pictures(5), "--num_shapes", 20)["statistics"]

    def test_of_other_features_name_both(self, refused, kept, pictures, make_network, tmp_path):
        line = refused(pictures(3), reference=kept, features=make_network(tmp_path / "other", hidden_size=8))
        assert "are of the features 'tiny-vit' (" in line
        assert "those asked for are 'other' (" in line
        assert "16 of them" in line
        assert "8 of them" in line

    def test_published_ones_with_a_vision_model(self, refused, pictures, tmp_path):
        np.savez(tmp_path / "published.npz", mu=np.zeros(2048), sigma=np.eye(2048))
        line = refused(pictures(3), "--metric", "fid", reference=tmp_path / "published.npz")
        assert "are of the features 'inception'" in line
        assert "those asked for are 'tiny-vit'" in line
        line = refused(pictures(3), reference=tmp_path / "published.npz")
        assert "KID compares features, and these statistics have their mean and covariance alone" in line

    def test_of_another_size(self, refused, kept, pictures):
        line = refused(pictures(3, "large", size=(16, 16)), reference=kept)
        assert "of images of 8 x 8 pixels, and the images that are judged have 16 x 16" in line

    def test_with_flags_of_a_data_set(self, refused, kept, pictures):
        line = refused(pictures(3), "--crop_size", 8, reference=kept)
        assert f"--crop_size is for a data set, and {kept} is a file of statistics" in line

    def test_in_an_archive_of_another_network(self, refused, pictures, tmp_path):
        np.savez(tmp_path / "other.npz", mu=np.zeros(64), sigma=np.eye(64))
        line = refused(pictures(3), "--metric", "fid", reference=tmp_path / "other.npz")
        assert "an .npz is of Inception's 2,048 features, and its 'mu' has 64" in line

    def test_that_are_broken(self, refused, pictures, tmp_path):
        (tmp_path / "broken.npz").write_text("no archive")
        assert "broken.npz holds no statistics of features, or is damaged" in refused(
            pictures(3), reference=tmp_path / "broken.npz"
        )


class TestImages:
    def test_fewer_than_n(self, refused, pictures):
        assert "--n 5 is more than the 3 images of " in refused(pictures(3), n=5)

    @pytest.mark.parametrize("n", [1, 0, -3])
    def test_n_below_two(self, refused, pictures, n):
        assert f"--n must be at least 2, got {n}" in refused(pictures(3), n=n)

    def test_one_alone(self, refused, pictures):
        assert "takes two images at least, and there is 1" in refused(pictures(1), "--num_shapes", 20)

    def test_no_pipeline_and_no_images(self, refused, tmp_path):
        (tmp_path / "nothing").mkdir()
        line = refused(tmp_path / "nothing")
        assert "is neither a pipeline (it has no model_index.json) nor a folder of images" in line

    def test_a_model_without_its_pipeline(self, refused, pipeline):
        assert "nor a folder of images; give the pipeline's folder, above it" in refused(pipeline / "unet")

    def test_samples_of_which_one_is_missing(self, refused, measured, pipeline, tmp_path):
        out = tmp_path / "out"
        measured(pipeline, "--num_shapes", 20, "--steps", 1, n=5, out=out)
        Image.new("RGB", (8, 8)).save(out / "my favourite.png")
        measured(out, "--num_shapes", 20, n=None)  # what else lies there is none of them
        whole = (out / "000003.png").read_bytes()
        (out / "000003.png").write_bytes(whole[:-1])
        assert f"{out / '000003.png'} is cut off: call `scalelong sample` again" in refused(out, "--num_shapes", 20)
        (out / "000003.png").unlink()
        assert f"{out / '000003.png'} is missing: call `scalelong sample` again" in refused(out, "--num_shapes", 20)
        measured(out, "--num_shapes", 20, n=3)

    def test_prompts_for_a_model_without_text_or_that_are_not_there(self, refused, pipeline, tmp_path):
        line = refused(pipeline, prompts=tmp_path / "none.txt")
        assert f"--prompts is for models of text, and {pipeline} is none: ScaleLongUnconditionalPipeline" in line

    def test_of_several_sizes(self, refused, pictures):
        folder = pictures(3)
        Image.new("RGB", (9, 8)).save(folder / "999.png")
        assert "999.png has 9 x 8 pixels, and " in refused(folder, "--num_shapes", 20)

    def test_that_are_damaged(self, refused, pictures):
        folder = pictures(3)
        (folder / "001.png").write_bytes(b"no image")
        line = refused(folder, "--num_shapes", 20)
        assert "001.png can not be read: it is no image that Pillow knows" in line
        assert "skip" not in line, "of what is judged nothing is passed over"

    def test_a_sample_json_of_something_else_that_is_long(self, refused, pictures):
        folder = pictures(3)
        (folder / "sample.json").write_text(json.dumps(["a caption"] * 1000))
        line = refused(folder, "--num_shapes", 20)
        assert "sample.json is not the config of a model or pipeline: it holds ['a caption'" in line
        assert len(line) < 500

    def test_flags_of_sampling_for_a_folder(self, refused, pictures):
        folder = pictures(3)
        sentence = (
            f"--steps is for images that a pipeline is to make, and {folder} is none: it has no model_index.json"
        )
        assert sentence in refused(folder, steps=3)

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["--scheduler", "ddmi"], "unknown scheduler 'ddmi' (did you mean 'ddpm'?); accepted: "),
            (["--class", "nosuch"], "--class is for models of classes, and "),
            (["--steps", 0], "steps must be at least 1, got 0"),
            ([], "has images or a sample.json that `scalelong sample` did not make: give another --out"),
        ],
    )
    def test_what_can_not_be_made_is_said_before_the_reference_is_read(
        self, refused, pipeline, pictures, flags, sentence, tmp_path
    ):
        out = tmp_path / "out" if flags else pictures(3)
        assert sentence in refused(pipeline, *flags, "--num_shapes", 20, n=2, out=out)
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_so_is_a_folder_that_can_be_none(self, refused, pipeline, tmp_path):
        (tmp_path / "file").write_text("words")
        line = refused(pipeline, "--num_shapes", 20, n=2, out=tmp_path / "file" / "out")
        assert f"/out can not be a folder of images: {tmp_path / 'file'} is a file; give another --out" in line
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_a_run_without_a_pipeline(self, refused, tmp_path):
        (tmp_path / "run" / "samples").mkdir(parents=True)
        for step in (1, 2):
            Image.new("RGB", (8, 8)).save(tmp_path / "run" / "samples" / f"step-{step}.png")
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        line = refused(tmp_path / "run", "--num_shapes", 20)
        assert "run is the folder of a training run without a pipeline (model_index.json)" in line

    def test_so_is_guidance_that_can_not_be(self, refused, tmp_path):
        unet = UViTModel(
            sample_size=8, patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2, num_class_embeds=2
        )
        ScaleLongClassConditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "classes")
        complaint = refused(tmp_path / "classes", "--guidance", -1, "--num_shapes", 20, n=2, out=tmp_path / "out")
        assert "guidance_scale must be a number of at least 0 (1 is no guidance), got -1.0" in complaint
        assert not (tmp_path / "cache" / "statistics").exists()

    def test_a_model_that_is_not_there(self, refused):
        assert "nobody/nothing is no local folder, and the Hub can not be reached" in refused("nobody/nothing")

    def test_a_model_of_rectangles(self, refused, tmp_path):
        unet = UViTModel(sample_size=(8, 4), patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2)
        ScaleLongUnconditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "wide")
        assert "the images have 4 x 8 pixels" in refused(tmp_path / "wide")

    def test_another_seed_in_the_same_folder(self, measured, evaluate, pipeline, tmp_path):
        flags = ["--steps", 1, "--num_shapes", 20]
        measured(pipeline, *flags, n=2, out=tmp_path / "out")
        code, _, complaint = evaluate(pipeline, *flags, "--seed", 1, n=2, out=tmp_path / "out")
        assert code == 2
        assert "with seed 0, not 1: give another --out, or delete it" in complaint


class TestMetricsAndFeatures:
    def test_a_misspelt_metric(self, refused, pictures):
        line = refused(pictures(3), "--metric", "fid,kdi")
        assert "unknown metric 'kdi' (did you mean 'kid'?); accepted: fid, kid" in line
        assert "no metric is given" in refused(pictures(3), "--metric", ",")

    def test_no_image_processor(self, refused, pictures, network, tmp_path):
        ViTModel.from_pretrained(network).save_pretrained(tmp_path / "bare")
        assert "bare has no image processor" in refused(pictures(3), features=tmp_path / "bare")

    def test_a_pipeline_as_features(self, refused, pictures, pipeline):
        assert "is no model of transformers: it has no config.json" in refused(pictures(3), features=pipeline)

    def test_a_network_that_is_random(self, refused, pictures, tmp_path):
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        decoder = {f"decoder_{name}": value for name, value in size.items()}
        network = tmp_path / "masked"
        ViTMAEModel(ViTMAEConfig(image_size=8, patch_size=2, **size, **decoder)).save_pretrained(network)
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(network)
        line = refused(pictures(3), features=network)
        assert "masked gives other features of the same image each time: ViTMAEModel is random" in line

    def test_a_network_without_features_of_an_image(self, refused, pictures, tmp_path):
        network = tmp_path / "film"
        VideoMAEModel(
            VideoMAEConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        ).save_pretrained(network)
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(network)
        line = refused(pictures(3), features=network)
        assert "film gives no features of an image: VideoMAEModel ends with " in line

    def test_inception_without_its_package(self, refused, pictures, monkeypatch):
        monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
        line = refused(pictures(3), features=None)
        assert "features of Inception need the package torch-fidelity: pip install torch-fidelity" in line
        assert "or take a vision model of transformers as the features" in line

    def test_without_torchmetrics(self, refused, pictures, monkeypatch):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "torchmetrics", None)  # as Python has it for what can not be imported
        line = refused(pictures(3))
        assert "KID needs torchmetrics" in line
        assert "pip install 'scalelong-diffusers[evaluate]'" in line

    def test_a_device_that_is_not_there(self, refused, pictures):
        assert "--device cuda:7 can not be used" in refused(pictures(3), device="cuda:7")

    def test_a_misspelt_flag(self, refused, pictures):
        line = refused(pictures(3), "--metrics", "fid")
        assert "unknown argument '--metrics' (did you mean '--metric'?) (scalelong evaluate --help lists" in line


def test_json_is_all_that_is_printed(evaluate, pictures):
    code, printed, _ = evaluate(pictures(3), "--json", "--num_shapes", 20)
    assert code == 0
    assert json.loads(printed)["n"] == 3
    assert torch.isfinite(torch.tensor(json.loads(printed)["fid"]))
