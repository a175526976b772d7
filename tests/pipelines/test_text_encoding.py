"""Captions are read in training as prompts are read in sampling, and what can not be read is said."""

import json
import logging

import pytest
import torch
from diffusers import DDIMScheduler
from transformers import CLIPConfig, CLIPModel, T5Config

from scalelong_diffusers import ScaleLongTextToImagePipeline, UViTModel
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
def test_a_model_is_sampled_with_what_it_was_trained_with(uvit, tiny_clip, context_length):
    model = uvit(context_length=context_length)
    pipe = ScaleLongTextToImagePipeline(model, DDIMScheduler(), *tiny_clip)
    with torch.no_grad():
        states = CaptionEncoder(*tiny_clip, model)(CAPTIONS)
        sampled, null = pipe.encode_prompt(CAPTIONS)
    assert states.shape == (4, context_length, 16)
    assert torch.equal(states, sampled)
    torch.testing.assert_close(states[1], null[0])


def test_a_text_encoder_that_is_trained_along_gets_gradients(uvit, tiny_clip):
    encoder = CaptionEncoder(*tiny_clip, uvit())
    encoder(CAPTIONS).square().sum().backward()
    assert all(p.grad is not None for p in encoder.text_encoder.parameters())
    encoder.text_encoder.requires_grad_(False)
    assert not encoder(CAPTIONS).requires_grad


def test_what_is_cut_is_shown_once(uvit, tiny_clip, caplog):
    encoder = CaptionEncoder(*tiny_clip, uvit(context_length=5))
    with caplog.at_level(logging.WARNING, logger="scalelong_diffusers"):
        for _ in range(3):
            encoder(["a circle", "a red circle red a"])
    (record,) = caplog.records
    assert "a caption of 7 tokens is cut to 5" in record.getMessage()
    assert "lost: 'red a'; further captions may be cut" in record.getMessage()


@pytest.mark.parametrize(
    ("captions", "error", "message"),
    [
        (["a", None], TypeError, "captions must be texts; that at position 1 is None"),
        (["a", ["b"]], TypeError, r"that at position 1 is \['b'\]"),
        ("a", TypeError, "captions must be a list of texts, got 'a'"),
        ([], ValueError, "captions is an empty list"),
    ],
)
def test_captions_that_are_no_texts(uvit, tiny_clip, captions, error, message):
    with pytest.raises(error, match=message):
        CaptionEncoder(*tiny_clip, uvit())(captions)


def test_an_encoder_that_does_not_fit_the_model(uvit, tiny_clip):
    with pytest.raises(ValueError, match=r"hidden states are 16 wide, but this UViTModel takes 24.*cross_attention_d"):
        CaptionEncoder(*tiny_clip, uvit(cross_attention_dim=24))


def test_a_tokenizer_that_is_not_the_encoders(uvit, tiny_clip):
    encoder, tokenizer = tiny_clip
    tokenizer.add_tokens(["<sks>"])
    with pytest.raises(ValueError, match=r"the tokenizer has 62 tokens, but the text_encoder reads 61"):
        CaptionEncoder(encoder, tokenizer, uvit())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": 7}, "ends a text with token 60, but the text_encoder knows its end by token 7"),
        # As in the configs of OpenAI's CLIPs, which do not say what the end is.
        ({"eos_token_id": 2, "vocab_size": 70}, "the tokenizer has 61 tokens, but the text_encoder reads 70"),
    ],
)
def test_a_tokenizer_of_another_encoder(uvit, tiny_clip, config, message):
    encoder, tokenizer = tiny_clip
    encoder.config.update(config)
    with pytest.raises(ValueError, match=f"{message}.*: they do not belong together"):
        CaptionEncoder(encoder, tokenizer, uvit())


def test_the_end_that_openai_wrote_into_its_configs(uvit, tiny_clip):
    encoder, tokenizer = tiny_clip
    encoder.config.eos_token_id = 2
    assert CaptionEncoder(encoder, tokenizer, uvit()).tokenize(["a"])[0, -1] == tokenizer.eos_token_id


@pytest.fixture
def clip(tiny_clip, tmp_path):
    """The folder of a text encoder and its tokenizer."""
    for part in tiny_clip:
        part.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


def as_older_files(folder):
    """What is in tokenizer.json as vocab.json and merges.txt, which many a repository has alone."""
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

    def test_from_a_whole_clip(self, uvit, tiny_clip, tmp_path):
        encoder, tokenizer = tiny_clip
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        whole = CLIPModel(CLIPConfig(text_config=encoder.config.to_dict(), vision_config=vision)).eval()
        whole.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        loaded = CaptionEncoder(*load_text_encoder(tmp_path), uvit())
        ids = loaded.tokenize(CAPTIONS)
        assert torch.equal(loaded(CAPTIONS), whole.text_model(ids)[0])

    def test_half_precision_is_loaded_in_full_unless_it_is_asked_for(self, tiny_clip, tmp_path):
        encoder, tokenizer = tiny_clip
        encoder.half().save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert load_text_encoder(tmp_path)[0].dtype == torch.float32
        assert load_text_encoder(tmp_path, dtype=torch.float16)[0].dtype == torch.float16

    def test_an_older_tokenizer(self, clip, tiny_clip):
        as_older_files(clip)
        ids = load_text_encoder(clip)[1](CAPTIONS).input_ids
        assert ids == tiny_clip[1](CAPTIONS).input_ids

    def test_from_the_hub_and_from_the_cache_without_it(self, hub, clip):
        as_older_files(clip)
        hub("from huggingface_hub import HfApi\n"
            "HfApi().create_repo('tester/clip')\n"
            "HfApi().upload_folder(repo_id='tester/clip', folder_path='clip')")  # fmt: skip
        code = """
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder
print(load_text_encoder("tester/clip")[1]("a red circle").input_ids)
"""
        loaded = hub(code, home="elsewhere").stdout
        assert len(json.loads(loaded)) == 5
        assert hub(code, home="elsewhere", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9").stdout == loaded

    def test_without_a_tokenizer(self, uvit, tiny_clip, clip, tmp_path):
        (clip / "tokenizer.json").unlink()
        with pytest.raises(
            ValueError,
            match=r"without a tokenizer: there is neither tokenizer\.json nor vocab\.json and merges\.txt; give",
        ):
            load_text_encoder(clip)
        pipe = ScaleLongTextToImagePipeline(uvit(), DDIMScheduler(), *tiny_clip)
        pipe.save_pretrained(tmp_path / "pipe")
        (tmp_path / "pipe" / "tokenizer" / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match=r"neither tokenizer/tokenizer\.json nor tokenizer/vocab\.json and token"):
            load_text_encoder(tmp_path / "pipe")

    def test_weights_that_break_off(self, clip):
        weights = clip / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(OSError, match=r"the weights in .*clip are damaged, or were not downloaded to their end"):
            load_text_encoder(clip)

    @pytest.mark.parametrize(
        ("config", "name"), [({"hidden_size": 32}, "embeddings."), ({"num_hidden_layers": 2}, "encoder.layers.1.")]
    )
    def test_weights_of_another_config(self, clip, config, name, capfd):
        file = clip / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        with pytest.raises(ValueError, match=rf"do not fit its config\.json: {name}\S+ is missing or has another sh"):
            load_text_encoder(clip)
        assert "REPORT" not in capfd.readouterr().err

    def test_one_that_is_not_at_hand_offline(self):
        with pytest.raises(OSError, match=r"the Hub can not be reached.*`hf download openai/clip-vit-large-patch14`"):
            load_text_encoder("openai/clip-vit-large-patch14")

    def test_what_is_no_clip(self, tmp_path):
        T5Config().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"must be a CLIP, and .* has model_type 't5'"):
            load_text_encoder(tmp_path)

    def test_a_folder_without_one(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no text encoder: there is no config.json"):
            load_text_encoder(tmp_path)
