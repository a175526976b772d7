"""The tokenizer that is learned from captions and its text encoder: plain CLIP classes, reproducible."""

import pytest
import torch
from diffusers import DDIMScheduler

from scalelong_diffusers import ScaleLongTextToImagePipeline, UserError, UViTModel
from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer


CAPTIONS = [f"a {color} {shape}" for color in ("red", "Green", "blue") for shape in ("circle", "square", "triangle")]


@pytest.fixture
def small_clip():
    torch.manual_seed(0)
    tokenizer = build_tokenizer(CAPTIONS, context_length=10)
    return build_text_model(tokenizer, hidden_size=16, num_layers=1, num_attention_heads=2), tokenizer


class TestTokenizer:
    def test_words_of_the_captions_are_one_token(self):
        tokenizer = build_tokenizer(CAPTIONS)
        tokens = tokenizer.tokenize("A RED  triangle, green circle")
        assert tokens == ["a</w>", "red</w>", "triangle</w>", ",</w>", "green</w>", "circle</w>"]

    @pytest.mark.parametrize("text", ["purple", "élan 水 🎈", "it's 42!", "tab\tand\nline", "reds", "triang"])
    def test_spells_out_other_text(self, text):
        tokenizer = build_tokenizer(CAPTIONS)
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        # A letter outside the vocabulary would become the end token.
        assert tokenizer.eos_token_id not in ids[1:-1]
        assert "".join(tokenizer.decode(ids[1:-1]).split()) == "".join(text.split())

    def test_different_texts_have_different_ids(self):
        tokenizer = build_tokenizer(CAPTIONS)
        read = [tuple(tokenizer(text).input_ids) for text in ("re d", "red", "r ed", "", "r e d", "réd")]
        assert len(set(read)) == len(read)

    def test_a_small_vocabulary_keeps_the_most_frequent_words(self):
        captions = ["circle"] * 5 + ["square"]
        tokenizer = build_tokenizer(captions, vocab_size=2 * 256 + 2 + 5)
        assert len(tokenizer) == 2 * 256 + 2 + 5
        assert tokenizer.tokenize("circle") == ["circle</w>"]
        assert len(tokenizer.tokenize("square")) == 6

    def test_does_not_depend_on_the_order_of_the_captions(self):
        one, other = build_tokenizer(CAPTIONS), build_tokenizer(reversed(CAPTIONS))
        assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()

    def test_rejects_captions_without_words(self):
        with pytest.raises(UserError, match="the captions contain no word"):
            build_tokenizer(["", "  "])


def test_encoder_and_tokenizer_agree(small_clip):
    encoder, tokenizer = small_clip
    config = encoder.config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name)
    assert config.vocab_size == len(tokenizer)
    assert config.max_position_embeddings == tokenizer.model_max_length == 10
    ids = tokenizer("a red circle", padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        output = encoder(ids)
    end = 4  # start, three words
    torch.testing.assert_close(output.pooler_output, output.last_hidden_state[:, end], rtol=0, atol=0)


@pytest.mark.slow
def test_another_process_builds_the_same_tokenizer_and_transformers_loads_both(small_clip, in_fresh_process, tmp_path):
    encoder, tokenizer = small_clip
    encoder.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    texts = ["a Red circle", "", "purple 水"]
    ids = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        torch.save((ids, encoder(ids)[0]), tmp_path / "expected.pt")
    code = f"""
import sys, torch
from transformers import AutoTokenizer, CLIPTextModel, CLIPTokenizer
torch.set_num_threads(1)
ids, expected = torch.load("expected.pt")
for tokenizer in (CLIPTokenizer.from_pretrained("clip"), AutoTokenizer.from_pretrained("clip")):
    again = tokenizer({texts!r}, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert torch.equal(again, ids), again
encoder = CLIPTextModel.from_pretrained("clip")
assert torch.equal(encoder(ids)[0], expected)
assert not any(name.startswith("scalelong") for name in sys.modules)
from scalelong_diffusers.training.small_clip import build_tokenizer
print(build_tokenizer({CAPTIONS!r}).backend_tokenizer.to_str())
"""
    printed = in_fresh_process(code, PYTHONHASHSEED="3", RAYON_NUM_THREADS="3").stdout
    assert printed == build_tokenizer(CAPTIONS).backend_tokenizer.to_str() + "\n"


def test_works_in_a_pipeline_that_is_saved_and_loaded(small_clip, tmp_path):
    torch.manual_seed(0)
    unet = UViTModel(
        sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2, cross_attention_dim=16, context_length=10
    ).eval()
    pipe = ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *small_clip)
    pipe.save_pretrained(tmp_path)
    again = ScaleLongTextToImagePipeline.from_pretrained(tmp_path)
    images = []
    for one in (pipe, again):
        one.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        images.append(one("a green square", num_inference_steps=2, generator=generator, output_type="pt").images)
    assert torch.equal(*images)
