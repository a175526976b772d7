"""Encoding of captions in training and of prompts in sampling, and loading of text encoders."""

import json
import logging

import pytest
import torch
from diffusers import DDIMScheduler
from transformers import CLIPConfig, CLIPModel, T5Config, T5EncoderModel

from scalelong_diffusers import ScaleLongTextToImagePipeline, UserError, UViTModel
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder, load_text_encoder


CAPTIONS = ["a red circle", "", "xyz", "a red circle " * 6]


@pytest.fixture
def uvit():
    def build(**config):
        torch.manual_seed(0)
        config = {"cross_attention_dim": 16, "context_length": 12, **config}
        return UViTModel(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2, **config).eval()

    return build


@pytest.mark.parametrize("context_length", [12, 5])
def test_captions_and_prompts_are_encoded_alike(uvit, tiny_clip, context_length):
    model = uvit(context_length=context_length)
    pipe = ScaleLongTextToImagePipeline(model, DDIMScheduler(), *tiny_clip)
    with torch.no_grad():
        states = CaptionEncoder(*tiny_clip, model)(CAPTIONS)
        sampled, null = pipe.encode_prompt(CAPTIONS)
    assert states.shape == (4, context_length, 16)
    assert torch.equal(states, sampled)
    torch.testing.assert_close(states[1], null[0])


def test_a_trainable_text_encoder_gets_gradients(uvit, tiny_clip):
    encoder = CaptionEncoder(*tiny_clip, uvit())
    encoder(CAPTIONS).square().sum().backward()
    assert all(p.grad is not None for p in encoder.text_encoder.parameters())
    encoder.text_encoder.requires_grad_(False)
    assert not encoder(CAPTIONS).requires_grad


def test_warns_once_about_truncated_captions(uvit, tiny_clip, caplog):
    encoder = CaptionEncoder(*tiny_clip, uvit(context_length=5))
    with caplog.at_level(logging.WARNING, logger="scalelong_diffusers"):
        for _ in range(3):
            encoder(["a circle", "a red circle red a"])
    (record,) = caplog.records
    assert "a caption of 7 tokens is cut to 5" in record.getMessage()
    assert "lost: 'red a'; more captions may be cut" in record.getMessage()


def test_encodes_one_text_as_a_list_of_one(uvit, tiny_clip):
    encoder = CaptionEncoder(*tiny_clip, uvit())
    assert torch.equal(encoder("a circle"), encoder(["a circle"]))
    with pytest.raises(TypeError, match="TextEncodeInput must be"):
        encoder(["a", None])


def test_rejects_an_encoder_of_another_width(uvit, tiny_clip):
    with pytest.raises(
        UserError, match=r"hidden states have width 16, but this UViTModel takes 24.*cross_attention_d"
    ):
        CaptionEncoder(*tiny_clip, uvit(cross_attention_dim=24))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 60}, "the tokenizer has 61 tokens .* but the text_encoder has 60"),
        ({"eos_token_id": 7}, "ends texts with 60, but the text_encoder .* expects 7"),
        # The configs of OpenAI's CLIPs do not have the right end token.
        ({"eos_token_id": 2, "vocab_size": 70}, "the tokenizer has 61 tokens .* but the text_encoder has 70"),
    ],
)
def test_rejects_the_tokenizer_of_another_encoder(uvit, tiny_clip, config, message):
    encoder, tokenizer = tiny_clip
    encoder.config.update(config)
    with pytest.raises(UserError, match=f"{message}.*: they do not belong together"):
        CaptionEncoder(encoder, tokenizer, uvit())


def test_accepts_the_end_token_in_the_configs_of_openai(uvit, tiny_clip):
    encoder, tokenizer = tiny_clip
    encoder.config.eos_token_id = 2
    assert CaptionEncoder(encoder, tokenizer, uvit()).tokenize(["a"])[0, -1] == tokenizer.eos_token_id


@pytest.fixture
def clip(tiny_clip, tmp_path):
    """A folder with a text encoder and its tokenizer."""
    for part in tiny_clip:
        part.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


def as_older_files(folder):
    """Replace tokenizer.json by vocab.json and merges.txt, the only files in many repositories."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))


class TestLoading:
    @pytest.mark.parametrize("layout", ["clip", "pipeline"])
    def test_from_a_folder(self, uvit, tiny_clip, tmp_path, layout):
        encoder, tokenizer = tiny_clip
        if layout == "pipeline":
            ScaleLongTextToImagePipeline(uvit(), DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path)
        else:
            encoder.save_pretrained(tmp_path)
            tokenizer.save_pretrained(tmp_path)
        again = CaptionEncoder(*load_text_encoder(tmp_path), uvit())
        assert torch.equal(again(CAPTIONS), CaptionEncoder(encoder, tokenizer, uvit())(CAPTIONS))
        assert not again.text_encoder.training

    def test_from_a_clip_with_vision_model(self, uvit, tiny_clip, tmp_path):
        encoder, tokenizer = tiny_clip
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        clip_model = CLIPModel(CLIPConfig(text_config=encoder.config.to_dict(), vision_config=vision)).eval()
        clip_model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        loaded = CaptionEncoder(*load_text_encoder(tmp_path), uvit())
        ids = loaded.tokenize(CAPTIONS)
        assert torch.equal(loaded(CAPTIONS), clip_model.text_model(ids)[0])

    def test_loads_in_float32_by_default(self, tiny_clip, tmp_path):
        encoder, tokenizer = tiny_clip
        encoder.half().save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert load_text_encoder(tmp_path)[0].dtype == torch.float32
        assert load_text_encoder(tmp_path, dtype=torch.float16)[0].dtype == torch.float16

    def test_from_older_tokenizer_files(self, clip, tiny_clip):
        as_older_files(clip)
        ids = load_text_encoder(clip)[1](CAPTIONS).input_ids
        assert ids == tiny_clip[1](CAPTIONS).input_ids

    def test_rejects_a_folder_without_a_tokenizer(self, uvit, tiny_clip, clip, tmp_path):
        (clip / "tokenizer.json").unlink()
        with pytest.raises(
            UserError,
            match=r"has no tokenizer: there is neither tokenizer\.json nor vocab\.json and merges\.txt; pass",
        ):
            load_text_encoder(clip)
        pipe = ScaleLongTextToImagePipeline(uvit(), DDIMScheduler(), *tiny_clip)
        pipe.save_pretrained(tmp_path / "pipe")
        (tmp_path / "pipe" / "tokenizer" / "tokenizer.json").unlink()
        with pytest.raises(UserError, match=r"neither tokenizer/tokenizer\.json nor tokenizer/vocab\.json and token"):
            load_text_encoder(tmp_path / "pipe")

    def test_rejects_truncated_weights(self, clip):
        weights = clip / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(UserError, match=r"the weights in .*clip are damaged or incompletely downloaded"):
            load_text_encoder(clip)

    @pytest.mark.parametrize(
        ("config", "name"), [({"hidden_size": 32}, "embeddings."), ({"num_hidden_layers": 2}, "encoder.layers.1.")]
    )
    def test_rejects_weights_of_another_config(self, clip, config, name, capfd):
        file = clip / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        with pytest.raises(
            UserError, match=rf"do not fit its config\.json, or .*: {name}\S+ is missing or has another sh"
        ):
            load_text_encoder(clip)
        assert "REPORT" not in capfd.readouterr().err

    def test_needs_the_hub_for_an_id(self):
        with pytest.raises(UserError, match=r"openai/clip-vit-large-patch14 is not a local .* Hub cannot be reached"):
            load_text_encoder("openai/clip-vit-large-patch14")

    def test_rejects_other_text_encoders(self, clip):
        config = T5Config(vocab_size=61, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        T5EncoderModel(config).save_pretrained(clip)
        with pytest.raises(UserError, match=r"the weights of the text encoder in .* do not fit its config"):
            load_text_encoder(clip)

    def test_rejects_a_folder_without_a_text_encoder(self, clip):
        (clip / "config.json").unlink()
        with pytest.raises(UserError, match=r"do not fit its config\.json"):
            load_text_encoder(clip)
