"""Text-to-image from nothing: a CLIP that is there or one that is built and trained along, and what it is saved as."""

import argparse
import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers import ScaleLongTextToImagePipeline, ScaleLongUNet2DConditionModel, UViTModel
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.train import train_text_to_image
from scalelong_diffusers.training import TrainingStopped, leave_out


TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
FAST = {"max_train_steps": 3, "sample_steps": 3, "num_samples": 2, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def text_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    UViTModel(**TINY, cross_attention_dim=16, context_length=20).save_config(folder)
    return folder


@pytest.fixture
def clip(tiny_clip, tmp_path):
    """The folder of a text encoder of width 16 that reads 12 tokens."""
    for part in tiny_clip:
        part.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.fixture
def train_text(train, text_config):
    def run(output_dir, **changes):
        settings = {"model_config_name_or_path": text_config, **changes}
        return train(output_dir, script=train_text_to_image, **settings)

    return run


@pytest.fixture
def refused_text(refused, text_config):
    def run(**changes):
        return refused(script=train_text_to_image, **{"model_config_name_or_path": text_config, **changes})

    return run


def weights_of(folder, file="model.safetensors"):
    return load_file(folder / file)


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestASmallClip:
    def test_is_trained_along_and_saved_as_an_ordinary_one(self, train_text, tmp_path):
        folder = train_text(tmp_path / "run", **FAST)
        still = train_text(tmp_path / "still", learning_rate=0.0, **FAST)
        trained, initial = (weights_of(path / "text_encoder") for path in (folder, still))
        assert trained.keys() == initial.keys()
        # Of the words and positions those that were read; of the layers all.
        assert not any(torch.equal(trained[name], initial[name]) for name in trained)

        text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder")
        tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
        assert (text_encoder.config.hidden_size, tokenizer.model_max_length) == (16, 13)  # the longest caption
        assert tokenizer.tokenize("a red circle") == ["a</w>", "red</w>", "circle</w>"]
        pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
        assert pipe.unet.config.skip_scaling["method"] == "cs"
        images = pipe(["a red circle", ""], num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images
        assert [image.size for image in images] == [(8, 8)] * 2
        with Image.open(folder / "samples" / "step-000003.png") as grid:
            assert grid.size == (16, 8)

    def test_the_average_is_taken_of_it_too(self, train_text, tmp_path):
        folder = train_text(tmp_path / "run", ema_decay=0.5, **FAST)
        checkpoint = folder / "checkpoint-3"
        raw, average = (weights_of(checkpoint / name) for name in ("text_encoder", "text_encoder_ema"))
        assert not are_equal(raw, average)
        assert are_equal(weights_of(folder / "text_encoder"), average)

    @pytest.mark.parametrize("changes", [{}, {"no-use_ema": True, "gradient_accumulation_steps": 2}], ids=str)
    def test_resumed_bit_for_bit(self, train_text, assert_same_run, tmp_path, changes):
        changes = {"max_train_steps": 8, "checkpointing_steps": 3, **changes}
        expected = train_text(tmp_path / "unbroken", **changes)
        broken = shutil.copytree(expected, tmp_path / "broken")
        for step in (6, 8):
            shutil.rmtree(broken / f"checkpoint-{step}")
        train_text(broken, resume_from_checkpoint="latest", **changes)
        assert (broken / "checkpoint-8" / "text_encoder").is_dir()
        assert_same_run(broken, expected)
        assert are_equal(weights_of(broken / "text_encoder"), weights_of(expected / "text_encoder"))

    def test_gradient_checkpointing_covers_it(self, train_text, metrics_of, tmp_path):
        one, other = (
            metrics_of(train_text(tmp_path / str(on), gradient_checkpointing=on, **FAST)) for on in (None, True)
        )
        assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in other], abs=1e-5)

    @pytest.mark.slow
    def test_two_processes_train_it_as_one_does(self, train_text, launch, metrics_of, text_config, tmp_path):
        changes = {"max_train_steps": 4, "sample_steps": 0, "model_config_name_or_path": text_config}
        script = train_text_to_image.__file__
        two = launch(tmp_path / "two", processes=2, script=script, train_batch_size=2, **changes)
        one = train_text(tmp_path / "one", **changes)
        code, _, errors = two.wait()
        assert code == 0, errors
        losses = [[line["loss"] for line in metrics_of(folder)] for folder in (one, tmp_path / "two")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class TestAClipThatIsThere:
    def test_stays_as_it_was(self, train_text, clip, tmp_path):
        folder = train_text(tmp_path / "run", pretrained_text_encoder_name_or_path=clip, **FAST)
        assert are_equal(weights_of(folder / "text_encoder"), weights_of(clip))
        assert {path.name for path in (folder / "checkpoint-3").iterdir() if path.is_dir()} == {"unet", "unet_ema"}
        pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
        assert pipe.tokenizer.model_max_length == 12

    def test_is_trained_where_it_is_asked_for(self, train_text, clip, tmp_path):
        changes = {"pretrained_text_encoder_name_or_path": clip, "train_text_encoder": True}
        folder = train_text(tmp_path / "run", **changes, **FAST)
        assert not are_equal(weights_of(folder / "text_encoder"), weights_of(clip))

    @pytest.mark.parametrize(("model_type", "kind"), [("uvit", UViTModel), ("unet", ScaleLongUNet2DConditionModel)])
    def test_the_small_models_are_made_for_it(self, train_text, clip, tmp_path, model_type, kind):
        changes = {"model_config_name_or_path": None, "model_type": model_type, "max_train_steps": 1}
        folder = train_text(tmp_path / "run", pretrained_text_encoder_name_or_path=clip, **changes)
        model = kind.from_pretrained(folder / "unet")
        assert model.config.cross_attention_dim == 16
        assert model.config.get("context_length", 12) == 12
        assert model.config.skip_scaling["method"] == "cs"

    def test_latents(self, train_text, clip, tiny_vae, tmp_path):
        tiny_vae.save_pretrained(tmp_path / "vae")
        changes = {"pretrained_vae_model_name_or_path": tmp_path / "vae", "model_config_name_or_path": None}
        changes |= {"resolution": 16, "max_train_steps": 1}
        folder = train_text(tmp_path / "run", pretrained_text_encoder_name_or_path=clip, **changes)
        pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
        assert pipe.unet.config.in_channels == 4
        assert pipe("a red circle", num_inference_steps=1).images[0].size == (16, 16)


class TestCaptionsThatAreLeftOut:
    def batch(self, size, first_step=0):
        data = load_training_data(
            DataConfig(resolution=8), channels=3, needs_labels=False, needs_captions=True, seed=0
        )
        return next(iter(data.train.batches(batch_size=size, first_step=first_step, num_steps=1)))

    def test_in_the_proportion_that_was_asked_for(self):
        batch = self.batch(1000)
        texts = leave_out(batch, 0.3)
        assert texts.count("") == pytest.approx(300, abs=45)  # three standard deviations
        assert all(text in ("", caption) for text, caption in zip(texts, batch["captions"]))
        assert leave_out(batch, 0.0) == batch["captions"]

    def test_by_position_alone(self):
        whole = leave_out(self.batch(8), 0.5)
        torch.manual_seed(1)
        assert leave_out(self.batch(4), 0.5) + leave_out(self.batch(4, first_step=1), 0.5) == whole
        assert len({text == "" for text in whole}) == 2

    def test_whichever_caption_was_drawn(self):
        """The two draws have nothing to do with each other: all wordings are left out alike."""
        batch = self.batch(1500)
        left_out = [text == "" for text in leave_out(batch, 0.5)]
        wordings = {
            "plain": [out for out, text in zip(left_out, batch["captions"]) if len(text.split()) == 3],
            "picture": [out for out, text in zip(left_out, batch["captions"]) if text.startswith("a picture")],
        }
        for outs in wordings.values():
            assert len(outs) > 200
            assert sum(outs) / len(outs) == pytest.approx(0.5, abs=0.1)

    def test_they_are_the_empty_text(self, train_text, metrics_of, monkeypatch, tmp_path):
        """With nearly all left out a model is trained on what guidance leads away from: captions do not count."""

        def losses(name, proportion):
            folder = train_text(tmp_path / name, proportion_empty_prompts=proportion, **FAST)
            return [line["loss"] for line in metrics_of(folder)]

        with_captions, left_out = losses("with_captions", 0.0), losses("left_out", 0.999999)
        monkeypatch.setattr(train_text_to_image, "leave_out", lambda batch, proportion: [""] * len(batch))
        assert left_out == losses("empty", 0.0)
        assert left_out != with_captions


def parsed(*flags) -> argparse.Namespace:
    return train_text_to_image.parse_args(list(flags))


def test_a_preset_sets_what_the_paper_says():
    named = ["--pretrained_vae_model_name_or_path", "vae", "--pretrained_text_encoder_name_or_path", "clip"]
    args = parsed("--preset", "mscoco-uvit-s-2", *named)
    assert (args.proportion_empty_prompts, args.guidance_scale, args.latent_scale) == (0.1, 2.0, 0.23010)
    assert (args.adam_beta1, args.adam_beta2, args.ddpm_beta_schedule) == (0.9, 0.9, "scaled_linear")
    assert (args.resolution, args.random_flip, args.total_batch_size) == (256, False, 256)
    assert not args.train_text_encoder
    assert (
        parsed("--preset", "mscoco-uvit-s-2", *named, "--proportion_empty_prompts", "0.2").proportion_empty_prompts
        == 0.2
    )


class TestRefused:
    def test_prompts_that_are_too_long(self, refused_text, clip):
        prompts = ["a red circle", "a red circle " * 5]
        sentence = refused_text(pretrained_text_encoder_name_or_path=clip, validation_prompts=prompts)
        assert "--validation_prompts: 'a red circle a red circle" in sentence
        assert "has 17 tokens, and its encoder and model read 12: shorten it" in sentence

    def test_an_encoder_of_another_width(self, refused_text, clip, tmp_path):
        UViTModel(**TINY, cross_attention_dim=24).save_config(tmp_path / "wide")
        sentence = refused_text(pretrained_text_encoder_name_or_path=clip, model_config_name_or_path=tmp_path / "wide")
        assert "hidden states are 16 wide, but this UViTModel takes 24" in sentence

    def test_an_encoder_that_is_damaged(self, refused_text, clip):
        weights = clip / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        sentence = refused_text(pretrained_text_encoder_name_or_path=clip)
        assert f"the weights in {clip} are damaged, or were not downloaded to their end" in sentence

    def test_an_encoder_with_the_config_of_another_in_one_line(self, launch, clip, text_config, tmp_path):
        config = json.loads((clip / "config.json").read_text())
        (clip / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
        changes = {"model_config_name_or_path": text_config, "pretrained_text_encoder_name_or_path": clip}
        status, _, errors = launch(tmp_path / "run", script=train_text_to_image.__file__, **changes).wait()
        assert status == 2
        (line,) = errors.strip().splitlines()
        assert line.startswith(f"train_text_to_image: the weights of the text encoder in {clip} do not fit its config")

    def test_an_encoder_without_its_tokenizer(self, refused_text, clip):
        (clip / "tokenizer.json").unlink()
        sentence = refused_text(pretrained_text_encoder_name_or_path=clip)
        assert "there is neither tokenizer.json nor vocab.json and merges.txt" in sentence

    def test_an_encoder_that_is_not_at_hand(self, refused_text):
        sentence = refused_text(pretrained_text_encoder_name_or_path="some/clip")
        assert "some/clip is no local folder, and the Hub can not be reached" in sentence
        assert "hf download some/clip" in sentence

    def test_a_model_without_text(self, refused_text, tiny_config):
        sentence = refused_text(model_config_name_or_path=tiny_config)
        assert "is a model that needs no condition, and this script gives encoder_hidden_states" in sentence

    def test_a_preset_without_its_encoder(self, refused_text):
        sentence = refused_text(
            preset="mscoco-uvit-s-2", model_config_name_or_path=None, pretrained_vae_model_name_or_path="vae"
        )
        assert "reads text by a CLIP of width 768: give --pretrained_text_encoder_name_or_path" in sentence

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"proportion_empty_prompts": 1}, r"--proportion_empty_prompts must be in [0, 1), got 1.0"),
            ({"proportion_empty_prompt": 0.1}, "(did you mean '--proportion_empty_prompts'?)"),
            ({"preset": "imagenet64-uvit-m-4"}, "is for train_class_conditional.py; accepted here: mscoco-uvit-s-2"),
        ],
    )
    def test_flags(self, refused_text, changes, message):
        assert message in refused_text(**changes)

    @pytest.mark.parametrize("caption", ["", None, 3, [], ["a red circle", ""]], ids=str)
    def test_captions_that_are_none(self, refused_text, tmp_path, caption):
        folder = tmp_path / "pictures"
        folder.mkdir()
        good = ["a red circle"] if isinstance(caption, list) else "a red circle"
        rows = [{"file_name": f"{number}.png", "text": caption if number == 3 else good} for number in range(5)]
        if caption == 3:
            rows = [{**row, "text": number} for number, row in enumerate(rows)]
        for row in rows:
            Image.new("RGB", (8, 8)).save(folder / row["file_name"])
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sentence = refused_text(train_data_dir=folder)
        assert ("(row 0: 0); a caption is a text" if caption == 3 else "3.png") in sentence

    def test_images_without_captions(self, refused_text, tmp_path):
        folder = tmp_path / "pictures"
        folder.mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        assert "caption" in refused_text(train_data_dir=folder)


def test_what_was_trained_with_another_encoder_is_not_resumed(train_text, clip, tmp_path):
    folder = train_text(tmp_path / "run", **FAST)
    with pytest.raises(TrainingStopped, match="pretrained_text_encoder_name_or_path was None and is"):
        train_text(folder, pretrained_text_encoder_name_or_path=clip, resume_from_checkpoint="latest", **FAST)
