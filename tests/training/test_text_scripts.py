"""Text-to-image training with a pretrained CLIP, or with a small one that is built from the captions and trained."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers import ScaleLongTextToImagePipeline, ScaleLongUNet2DConditionModel, UViTModel
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.train import train_text_to_image
from scalelong_diffusers.training import text
from scalelong_diffusers.training.posthoc_ema import reconstruct_ema


FAST = {"max_train_steps": 3, "sample_steps": 3, "num_samples": 2, "num_inference_steps": 2}
CLIP = "pretrained_text_encoder_name_or_path"


@pytest.fixture
def clip(tiny_clip, tmp_path):
    """The folder of a text encoder of width 16 that reads 12 tokens."""
    for part in tiny_clip:
        part.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.fixture(scope="module")
def train_text_once(train_once, tiny_config):
    def run(output_dir, **changes):
        settings = {"model_config_name_or_path": tiny_config / "text", **changes}
        return train_once(output_dir, script=train_text_to_image, **settings)

    return run


@pytest.fixture
def train_text(train, train_text_once):
    return train_text_once


@pytest.fixture(scope="module")
def finished_text(train_text_once, tmp_path_factory):
    """A run with a small CLIP and a checkpoint of each step. Tests only read it."""
    folder = tmp_path_factory.mktemp("text") / "run"
    return train_text_once(folder, **{**FAST, "max_train_steps": 8}, checkpointing_steps=1, ema_decay=0.5)


@pytest.fixture
def refused_text(refused, tiny_config):
    def run(**changes):
        return refused(script=train_text_to_image, **{"model_config_name_or_path": tiny_config / "text", **changes})

    return run


def weights_of(folder, file="model.safetensors"):
    return load_file(folder / file)


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
class TestSmallClip:
    def test_is_trained_and_saved_as_a_plain_clip(self, train_text, finished_text, tmp_path):
        untrained = train_text(tmp_path / "untrained", learning_rate=1e-12, max_train_steps=1)
        trained, initial = (weights_of(path / "text_encoder") for path in (finished_text, untrained))
        assert trained.keys() == initial.keys()
        assert not any(torch.equal(trained[name], initial[name]) for name in trained)

        text_encoder = CLIPTextModel.from_pretrained(finished_text / "text_encoder")
        tokenizer = CLIPTokenizer.from_pretrained(finished_text / "tokenizer")
        assert text_encoder.config.hidden_size == 16
        assert tokenizer.model_max_length == 13  # the longest caption
        assert tokenizer.tokenize("a red circle") == ["a</w>", "red</w>", "circle</w>"]
        pipe = ScaleLongTextToImagePipeline.from_pretrained(finished_text)
        assert pipe.unet.config.skip_scaling["method"] == "cs"
        images = pipe(["a red circle", ""], num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images
        assert [image.size for image in images] == [(8, 8)] * 2
        with Image.open(finished_text / "samples" / "step-000003.png") as grid:
            assert grid.size == (256, 156)  # enlarged, with prompts

    def test_has_ema_weights(self, finished_text):
        checkpoint = finished_text / "checkpoint-8"
        raw, average = (weights_of(checkpoint / name) for name in ("text_encoder", "text_encoder_ema"))
        assert not are_equal(raw, average)
        assert are_equal(weights_of(finished_text / "text_encoder"), average)

    def test_resumes_exactly(self, train_text, finished_text, stopped_at, assert_same_run):
        folder = stopped_at(3, finished_text)
        options = {**FAST, "max_train_steps": 8, "checkpointing_steps": 1, "ema_decay": 0.5}
        train_text(folder, **options, resume_from_checkpoint="latest")
        assert_same_run(folder, finished_text)
        assert are_equal(weights_of(folder / "text_encoder"), weights_of(finished_text / "text_encoder"))

    def test_ema_of_any_length_has_the_encoder(self, train_text, tmp_path):
        folder = train_text(tmp_path / "run", max_train_steps=2, ema_snapshot_steps=1)
        [result] = reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.05])
        encoder = ScaleLongTextToImagePipeline.from_pretrained(result.folder).text_encoder
        expected = load_file(folder / "ema_snapshots" / "step-2.safetensors")
        for name, parameter in encoder.named_parameters():
            torch.testing.assert_close(parameter.data, expected[f"0.05/text_encoder.{name}"])
        assert not are_equal(weights_of(Path(result.folder, "text_encoder")), weights_of(folder / "text_encoder"))

    def test_gradient_checkpointing_changes_nothing(self, train_text, finished_text, metrics_of, tmp_path):
        folder = train_text(tmp_path / "run", **FAST, ema_decay=0.5, gradient_checkpointing=True)
        losses, expected = ([line["loss"] for line in metrics_of(run)] for run in (folder, finished_text))
        assert losses == pytest.approx(expected[:3], abs=1e-5)

    def test_two_processes_equal_one(self, launch, finished_text, metrics_of, tiny_config, tmp_path):
        changes = {"max_train_steps": 4, "train_batch_size": 2, "model_config_name_or_path": tiny_config / "text"}
        code, _, errors = launch(tmp_path / "two", processes=2, script=train_text_to_image, **changes).wait()
        assert code == 0, errors
        losses, expected = ([line["loss"] for line in metrics_of(run)] for run in (tmp_path / "two", finished_text))
        assert losses == pytest.approx(expected[:4], abs=1e-5)


@pytest.mark.slow
class TestPretrainedClip:
    def test_is_frozen(self, train_text, clip, tmp_path):
        folder = train_text(tmp_path / "run", **{CLIP: clip}, **FAST)
        assert are_equal(weights_of(folder / "text_encoder"), weights_of(clip))
        assert {path.name for path in (folder / "checkpoint-3").iterdir() if path.is_dir()} == {"unet", "unet_ema"}
        assert ScaleLongTextToImagePipeline.from_pretrained(folder).tokenizer.model_max_length == 12

    def test_is_trained_with_a_flag(self, train_text, clip, tmp_path):
        folder = train_text(tmp_path / "run", **{CLIP: clip}, train_text_encoder=True, max_train_steps=2)
        assert not are_equal(weights_of(folder / "text_encoder"), weights_of(clip))

    @pytest.mark.parametrize(
        ("model_type", "model_class"), [("uvit", UViTModel), ("unet", ScaleLongUNet2DConditionModel)]
    )
    def test_built_in_models_fit_it(self, train_text, clip, tmp_path, model_type, model_class):
        changes = {"model_config_name_or_path": None, "model_type": model_type, "max_train_steps": 1}
        folder = train_text(tmp_path / "run", **{CLIP: clip}, **changes, validation_steps=0)
        model = model_class.from_pretrained(folder / "unet")
        assert model.config.cross_attention_dim == 16
        assert model.config.get("context_length", 12) == 12
        assert model.config.skip_scaling["method"] == "cs"

    def test_latents(self, train_text, clip, tiny_vae, tmp_path):
        tiny_vae.save_pretrained(tmp_path / "vae")
        changes = {"pretrained_vae_model_name_or_path": tmp_path / "vae", "model_config_name_or_path": None}
        folder = train_text(tmp_path / "run", **{CLIP: clip}, **changes, resolution=16, max_train_steps=1)
        pipe = ScaleLongTextToImagePipeline.from_pretrained(folder)
        assert pipe.unet.config.in_channels == 4
        assert pipe("a red circle", num_inference_steps=1).images[0].size == (16, 16)


class TestDroppedCaptions:
    def test_have_the_given_share_whichever_caption_was_chosen(self):
        config = DataConfig(resolution=8)
        data = load_training_data(config, channels=3, needs_labels=False, needs_captions=True, seed=0)
        batch = next(iter(data.train.batches(batch_size=1500, num_steps=1)))
        dropped = (batch.uniform("dropped condition") < 0.3).tolist()
        wordings = {
            "plain": [out for out, caption in zip(dropped, batch["captions"]) if len(caption.split()) == 3],
            "picture": [out for out, caption in zip(dropped, batch["captions"]) if caption.startswith("a picture")],
            "all": dropped,
        }
        for outs in wordings.values():
            assert len(outs) > 200
            assert sum(outs) / len(outs) == pytest.approx(0.3, abs=0.1)

    @pytest.mark.slow
    def test_count_as_empty(self, train_text, metrics_of, monkeypatch, tmp_path):
        """Training with nearly all captions dropped equals training with empty captions."""

        def losses(name, proportion):
            options = {"proportion_empty_prompts": proportion, "max_train_steps": 3}
            return [line["loss"] for line in metrics_of(train_text(tmp_path / name, **options))]

        with_captions, dropped = losses("with_captions", 0.0), losses("dropped", 0.999999)
        tokenize = text.tokenize
        monkeypatch.setattr(text, "tokenize", lambda captions, **options: tokenize([""] * len(captions), **options))
        assert dropped == losses("empty", 0.0)
        assert dropped != with_captions


@pytest.mark.slow
class TestRejects:
    def test_prompts_that_are_too_long(self, refused_text, clip):
        prompts = ["a red circle", "a red circle " * 5]
        message = refused_text(**{CLIP: clip}, validation_prompts=prompts)
        assert "--validation_prompts: 'a red circle a red circle" in message
        assert "has 17 tokens, but its encoder and model read only 12: shorten it" in message

    def test_encoders_that_do_not_fit_or_load(self, refused_text, clip, tmp_path):
        UViTModel(
            sample_size=8, patch_size=2, hidden_size=16, num_layers=4, num_attention_heads=2, cross_attention_dim=24
        ).save_config(tmp_path / "wide")
        message = refused_text(**{CLIP: clip}, model_config_name_or_path=tmp_path / "wide")
        assert "hidden states have width 16, but this UViTModel takes 24" in message
        message = refused_text(**{CLIP: "some/clip"})
        assert "some/clip is not a local folder, and the Hub cannot be reached" in message

        config_file, weights_file = clip / "config.json", clip / "model.safetensors"
        config, weights = config_file.read_text(), weights_file.read_bytes()
        config_file.write_text(json.dumps({**json.loads(config), "hidden_size": 32}))
        assert f"the weights of the text encoder in {clip} do not fit" in refused_text(**{CLIP: clip})
        config_file.write_text(config)
        weights_file.write_bytes(weights[:5000])
        assert "damaged" in refused_text(**{CLIP: clip})
        weights_file.write_bytes(weights)
        (clip / "tokenizer.json").unlink()
        assert "neither tokenizer.json nor vocab.json and merges.txt" in refused_text(**{CLIP: clip})

    def test_models_and_presets_without_their_encoder(self, refused_text, tiny_config):
        message = refused_text(model_config_name_or_path=tiny_config)
        assert "is a model that takes no condition, but this script passes encoder_hidden_states" in message
        options = {"model_config_name_or_path": None, "pretrained_vae_model_name_or_path": "vae"}
        message = refused_text(preset="mscoco-uvit-s-2", **options)
        assert "vae" in message

    def test_invalid_captions(self, refused_text, tmp_path):
        for number, caption in enumerate(("", None, 3, [], ["a red circle", ""])):
            folder = tmp_path / str(number)
            folder.mkdir()
            good = ["a red circle"] if isinstance(caption, list) else 3 if caption == 3 else "a red circle"
            rows = [{"file_name": f"{k}.png", "text": caption if k == 3 else good} for k in range(5)]
            for row in rows:
                Image.new("RGB", (8, 8)).save(folder / row["file_name"])
            (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            message = refused_text(train_data_dir=folder, num_shapes=None)
            assert ("row 0" if caption == 3 else "3.png") in message, message

    def test_images_without_captions(self, refused_text, tmp_path):
        folder = tmp_path / "images"
        folder.mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        assert "caption" in refused_text(train_data_dir=folder, num_shapes=None)

    def test_resuming_with_another_encoder(self, train_text, finished_text, stopped_at, clip):
        folder = stopped_at(2, finished_text)
        with pytest.raises(UserError, match="pretrained_text_encoder_name_or_path was None and is"):
            train_text(folder, **{CLIP: clip}, **FAST, ema_decay=0.5, resume_from_checkpoint="latest")
