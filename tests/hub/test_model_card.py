"""Model cards: their facts and snippets, and that text of their owner is kept."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from huggingface_hub import ModelCard
from PIL import Image

from scalelong_diffusers import (
    CardFacts,
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUNet2DConditionModel,
    UserError,
    UViTModel,
    apply_skip_scaling,
    skip_connections,
)
from scalelong_diffusers.hub.model_card import END, START, last_samples, make_card


def uvit(skip_scaling="cs", **config):
    config = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, **config}
    return UViTModel(**config, skip_scaling=skip_scaling)


@pytest.fixture
def pipe():
    return ScaleLongClassConditionalPipeline(uvit(num_class_embeds=5), DDIMScheduler(), null_class=4)


@pytest.mark.parametrize(
    ("skip_scaling", "sentence"),
    [
        ("none", "The long skip connections are not scaled."),
        ("inv_sqrt2", "Every long skip is multiplied by 1/sqrt(2)"),
        ({"method": "constant", "kappa": 0.7}, "Every long skip is multiplied by kappa = 0.7"),
        (
            {"method": "cs", "kappa": 0.8},
            "Long skip i is multiplied by kappa^(i-1) with kappa = 0.8: constant scaling",
        ),
        ("ls", "A small gate predicts the factor of each long skip: learnable scaling (LS)"),
        ("learnable", "Each long skip is multiplied by a learned number"),
    ],
)
def test_describes_the_scaling_and_lists_the_skips(skip_scaling, sentence):
    model = uvit(skip_scaling)
    text = make_card(model, "user/model", CardFacts()).text
    assert sentence in text
    assert f"```text\n{skip_connections(model)}\n```" in text


def test_describes_reversed_scaling_and_strength():
    text = make_card(uvit({"method": "cs", "reverse": True, "strength": 0.5}), "user/model", CardFacts()).text
    assert "kappa^(N-i+1)" in text
    assert "strength 0.5" in text


def test_lists_only_known_facts(pipe):
    known = make_card(
        pipe,
        "user/model",
        CardFacts(
            preset="cifar10-uvit-s-2",
            training_data="CIFAR-10",
            training={"steps": 500_000, "batch size": 128},
            metrics={"FID-50k (train, DDIM 50)": 2.98},
            samples=Image.new("RGB", (8, 8)),
            license="mit",
        ),
    )
    for line in ("| preset | cifar10-uvit-s-2 |", "| data | CIFAR-10 |", "| steps | 500000 |", "| batch size | 128 |"):
        assert line in known.text
    assert "| FID-50k (train, DDIM 50) | 2.98 |" in known.text
    assert "![samples](samples.png)" in known.text
    assert known.data.license == "mit"
    unknown = make_card(pipe, "user/model", CardFacts())
    for word in ("Training", "Results", "Classes", "samples", "None"):
        assert word not in unknown.text
    assert unknown.data.license is None


def test_lists_class_names(pipe):
    names = ["cat", "a | b", "dog", "bird"]
    named = ScaleLongClassConditionalPipeline(pipe.unet, DDIMScheduler(), class_names=names, null_class=4)
    text = make_card(named, "user/model", CardFacts()).text
    assert "## Classes\n\n0: cat, 1: a \\| b, 2: dog, 3: bird\n" in text
    many = uvit(num_class_embeds=1000)
    named = ScaleLongClassConditionalPipeline(many, DDIMScheduler(), class_names=[f"c{i}" for i in range(1000)])
    text = make_card(named, "user/model", CardFacts()).text
    assert "98: c98, 99: c99, ... (1000 in `pipe.config.class_names`)\n" in text


def test_tags(pipe, tiny_stable_diffusion):
    data = make_card(pipe, "user/model", CardFacts()).data
    assert data.library_name == "diffusers"
    assert data.pipeline_tag == "unconditional-image-generation"
    assert data.tags == ["diffusers", "scalelong", "skip-scaling"]
    apply_skip_scaling(tiny_stable_diffusion, "cs")
    assert make_card(tiny_stable_diffusion, "user/model", CardFacts()).data.pipeline_tag == "text-to-image"


class TestSnippet:
    def test_for_our_pipelines(self, pipe):
        text = make_card(pipe, "user/model", CardFacts(), load_options={"revision": "ema"}).text
        assert "from scalelong_diffusers import ScaleLongClassConditionalPipeline\n" in text
        assert 'ScaleLongClassConditionalPipeline.from_pretrained("user/model", revision="ema")\n' in text
        assert "image = pipe(0).images[0]\n" in text

    def test_for_stock_pipelines_imports_the_package(self, ddpm, tiny_stable_diffusion):
        pipe = DDPMPipeline(ddpm.build_scaled("cs"), DDPMScheduler())
        text = make_card(pipe, "user/model", CardFacts()).text
        assert "import scalelong_diffusers " in text
        assert "from diffusers import DDPMPipeline\n" in text
        apply_skip_scaling(tiny_stable_diffusion, "cs")
        assert isinstance(tiny_stable_diffusion, StableDiffusionPipeline)
        assert 'pipe("a photograph")' in make_card(tiny_stable_diffusion, "user/model", CardFacts()).text

    def test_for_a_model(self):
        assert 'model = UViTModel.from_pretrained("user/model")\n' in make_card(uvit(), "user/model", CardFacts()).text

    def test_only_loads_a_pipeline_that_needs_an_image(self, tiny_stable_diffusion):
        apply_skip_scaling(tiny_stable_diffusion, "cs")
        pipe = StableDiffusionImg2ImgPipeline(**tiny_stable_diffusion.components, requires_safety_checker=False)
        card = make_card(pipe, "user/model", CardFacts())
        assert 'pipe = StableDiffusionImg2ImgPipeline.from_pretrained("user/model")\n```' in card.text
        assert card.data.pipeline_tag is None

    def test_only_loads_a_pipeline_without_a_text_encoder(self, tiny_clip):
        unet = uvit(cross_attention_dim=16, context_length=12)
        card = make_card(ScaleLongTextToImagePipeline(unet, DDIMScheduler()), "user/model", CardFacts())
        assert 'pipe = ScaleLongTextToImagePipeline.from_pretrained("user/model")\n```' in card.text
        assert card.data.pipeline_tag is None
        complete = make_card(
            ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip), "user/model", CardFacts()
        )
        assert 'pipe("a photograph")' in complete.text


@pytest.mark.parametrize(
    ("attention", "tag"), [("CrossAttn", "text-to-image"), ("", "unconditional-image-generation")]
)
def test_the_task_is_text_to_image_only_with_cross_attention(attention, tag):
    blocks = {"down_block_types": (f"{attention}DownBlock2D",), "up_block_types": (f"{attention}UpBlock2D",)}
    sizes = {"block_out_channels": (16,), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 16}
    model = ScaleLongUNet2DConditionModel(**blocks, **sizes, mid_block_type=None, attention_head_dim=4)
    assert make_card(model, "user/model", CardFacts()).data.pipeline_tag == tag


def test_unwraps_a_compiled_unet(pipe):
    expected = str(make_card(pipe, "user/model", CardFacts()))
    pipe.unet = torch.compile(pipe.unet)
    assert str(make_card(pipe, "user/model", CardFacts())) == expected


def test_escapes_cells_of_tables():
    text = make_card(uvit(), "user/model", CardFacts(metrics={"FID | IS": "2.9\n| 9.1"})).text
    assert "| FID \\| IS | 2.9 \\| 9.1 |\n" in text


FOREIGN = "<img src=x onerror=alert()> [click](https://a.b) ![](https://a.b) `*_~ \x1b[31m\n# Title & more"
ESCAPED = (
    "&lt;img src=x onerror=alert()&gt; \\[click\\](https://a.b) !\\[\\](https://a.b) \\`\\*\\_\\~ \\\\u001b\\[31m "
    "# Title &amp; more"
)


def test_fields_hold_neither_html_nor_markdown(pipe):
    named = ScaleLongClassConditionalPipeline(pipe.unet, DDIMScheduler(), class_names=[FOREIGN, *"abc"], null_class=4)
    facts = CardFacts(preset=FOREIGN, training_data=FOREIGN, training={FOREIGN: FOREIGN}, metrics={FOREIGN: FOREIGN})
    text = make_card(named, "user/model", facts).text
    assert text.count(ESCAPED) == 7
    assert "<img" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("mark", [END, START, "<!-- scalelong: other -->"])
def test_a_mark_in_a_field_does_not_move_the_generated_part(pipe, mark):
    named = ScaleLongClassConditionalPipeline(pipe.unet, DDIMScheduler(), class_names=[mark, *"abc"], null_class=4)
    facts = CardFacts(training_data=mark, metrics={mark: 1})
    first = str(make_card(named, "user/model", facts, load_options={"variant": mark})) + "\nOn bias.\n"
    second = make_card(pipe, "user/model", CardFacts(), previous=first).text
    assert second == make_card(pipe, "user/model", CardFacts()).text + "\nOn bias.\n"


class TestTextOfTheOwner:
    def test_is_kept_around_the_generated_part(self, pipe):
        first = str(make_card(pipe, "user/model", CardFacts(metrics={"FID": 9.9})))
        edited = first.replace("tags:\n", "language: en\ntags:\n- my-tag\n")
        edited = edited.replace("---\n<!--", "---\nBefore: a \\1 and \\g<0>.\n\n<!--") + "\n## After\n\nOn bias.\n"
        second = make_card(pipe, "user/model", CardFacts(metrics={"FID": 3.1}), previous=edited)
        assert second.text.startswith("Before: a \\1 and \\g<0>.\n\n<!-- scalelong:")
        assert second.text.endswith("<!-- scalelong: end -->\n\n## After\n\nOn bias.\n")
        assert "3.1" in second.text
        assert "9.9" not in second.text
        assert second.data.to_dict()["language"] == "en"
        assert second.data.tags == ["my-tag", "diffusers", "scalelong", "skip-scaling"]

    def test_is_kept_around_a_part_written_by_an_older_version(self, pipe):
        old = "Before.\n\n<!-- scalelong: written anew at each push -->\nold\n<!-- scalelong: end -->\n\nAfter.\n"
        text = make_card(pipe, "user/model", CardFacts(), previous=f"---\nlicense: mit\n---\n{old}").text
        assert text.startswith("Before.\n\n<!-- scalelong: each push")
        assert text.endswith("<!-- scalelong: end -->\n\nAfter.\n")
        assert "old" not in text

    def test_keeps_task_and_license(self, pipe):
        previous = "---\nlicense: openrail\npipeline_tag: image-to-image\n---\nMy model.\n"
        card = make_card(pipe, "user/model", CardFacts(), previous=previous)
        assert (card.data.license, card.data.pipeline_tag) == ("openrail", "image-to-image")
        assert card.text.startswith("My model.\n\n<!-- scalelong:")

    def test_a_second_push_changes_nothing(self, pipe):
        once = str(make_card(pipe, "user/model", CardFacts()))
        assert str(make_card(pipe, "user/model", CardFacts(), previous=once)) == once
        assert str(ModelCard(once)) == once

    def test_is_kept_if_the_end_mark_was_removed(self, pipe):
        first = str(make_card(pipe, "user/model", CardFacts(metrics={"FID": 9.9})))
        previous = first.replace("<!-- scalelong: end -->", "On bias.")
        for fid in (3.1, 2.7):
            previous = str(make_card(pipe, "user/model", CardFacts(metrics={"FID": fid}), previous=previous))
        assert "On bias." in previous
        assert "| FID | 2.7 |" in previous
        assert "3.1" not in previous

    def test_rejects_damaged_metadata(self, pipe):
        with pytest.raises(UserError, match=r"^the metadata of the README\.md of user/model cannot be read") as error:
            make_card(pipe, "user/model", CardFacts(), previous="---\ntags: [a\n---\nMy model.\n")
        assert "\n" not in str(error.value)


def test_parses_facts():
    assert CardFacts.parse({"preset": "a"}) == CardFacts(preset="a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'metric'"):
        CardFacts.parse({"metric": {}})
    assert CardFacts.parse(None) == CardFacts()


def test_names_the_base_model(pipe):
    card = make_card(pipe, "user/model", CardFacts(base_model="some/base"))
    assert (card.data.base_model, card.data.base_model_relation) == ("some/base", "finetune")
    again = make_card(pipe, "user/model", CardFacts(), previous=str(card))
    assert (again.data.base_model, again.data.base_model_relation) == ("some/base", "finetune")


def test_shows_the_newest_samples_of_a_long_run(tmp_path):
    (tmp_path / "samples").mkdir()
    for step, shade in ((999_000, 10), (1_000_000, 200)):
        Image.new("L", (2, 2), shade).save(tmp_path / "samples" / f"step-{step:06d}.png")
    assert last_samples(tmp_path).getpixel((0, 0)) == 200
    assert last_samples(tmp_path / "samples") is None
