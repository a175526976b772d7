"""The tokenizer made of captions and its encoder: CLIP's own classes, the same in every process."""

import pytest
import torch
from diffusers import DDIMScheduler

from scalelong_diffusers import ScaleLongTextToImagePipeline, UViTModel
from scalelong_diffusers.training.small_clip import build_small_clip, build_tokenizer


CAPTIONS = [f"a {colour} {shape}" for colour in ("red", "Green", "blue") for shape in ("circle", "square", "triangle")]


@pytest.fixture
def small_clip():
    torch.manual_seed(0)
    return build_small_clip(CAPTIONS, hidden_size=16, num_layers=1, num_attention_heads=2, context_length=10)


class TestTokenizer:
    def test_a_word_of_the_captions_is_one_token(self):
        tokenizer = build_tokenizer(CAPTIONS)
        tokens = tokenizer.tokenize("A RED  triangle, green circle")
        assert tokens == ["a</w>", "red</w>", "triangle</w>", ",</w>", "green</w>", "circle</w>"]

    @pytest.mark.parametrize("text", ["purple", "élan 水 🎈", "it's 42!", "tab\tand\nline", "reds", "triang"])
    def test_any_other_text_is_spelt_out(self, text):
        tokenizer = build_tokenizer(CAPTIONS)
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        # A letter that is not in the vocabulary would be read as the end.
        assert tokenizer.eos_token_id not in ids[1:-1]
        assert "".join(tokenizer.decode(ids[1:-1]).split()) == "".join(text.split())

    def test_no_two_texts_are_read_alike(self):
        tokenizer = build_tokenizer(CAPTIONS)
        read = [tuple(tokenizer(text).input_ids) for text in ("re d", "red", "r ed", "", "r e d", "réd")]
        assert len(set(read)) == len(read)

    def test_the_most_frequent_words_come_first_where_there_is_little_room(self):
        captions = ["circle"] * 5 + ["square"]
        tokenizer = build_tokenizer(captions, vocab_size=2 * 256 + 2 + 5)
        assert len(tokenizer) == 2 * 256 + 2 + 5
        assert tokenizer.tokenize("circle") == ["circle</w>"]
        assert len(tokenizer.tokenize("square")) == 6

    def test_the_order_of_the_captions_does_not_matter(self):
        one, other = build_tokenizer(CAPTIONS), build_tokenizer(reversed(CAPTIONS))
        assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()

    def test_every_process_makes_the_same(self, in_fresh_process):
        code = f"""
from scalelong_diffusers.training.small_clip import build_tokenizer
print(build_tokenizer({CAPTIONS!r}).backend_tokenizer.to_str())
"""
        made = {in_fresh_process(code, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=seed).stdout for seed in ("1", "3")}
        assert made == {build_tokenizer(CAPTIONS).backend_tokenizer.to_str() + "\n"}

    @pytest.mark.parametrize(
        ("captions", "options", "message"),
        [
            (["a", None], {}, "captions must be texts; that of row 1 is None"),
            (["", "  "], {}, "there is no word in the captions"),
            (["a"], {"vocab_size": 100}, "vocab_size must be at least 514, which spells any text; got 100"),
            (["a"], {"context_length": 2}, "context_length must leave room for a token between start and end, got 2"),
        ],
    )
    def test_what_can_not_be(self, captions, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            build_tokenizer(captions, **options)


def test_the_encoder_knows_the_tokens_of_its_tokenizer(small_clip):
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


def test_transformers_loads_both_in_a_fresh_process(small_clip, in_fresh_process, tmp_path):
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
"""
    in_fresh_process(code)


def test_it_draws_in_a_pipeline_that_is_saved_and_loaded(small_clip, tmp_path):
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
