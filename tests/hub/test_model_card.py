"""The model card: what it says of a model, and that what people write into it stays."""

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
    UViTModel,
    apply_skip_scaling,
    skip_connections,
)
from scalelong_diffusers.hub.model_card import make_card


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
        ("ls", "Each long skip is multiplied by what a small gate makes of it: learnable scaling (LS)"),
        ("learnable", "Each long skip is multiplied by a learned number"),
    ],
)
def test_it_says_the_scaling_and_lists_the_skips(skip_scaling, sentence):
    model = uvit(skip_scaling)
    text = make_card(model, "user/model", CardFacts()).text
    assert sentence in text
    assert f"```text\n{skip_connections(model)}\n```" in text


def test_the_ablation_is_said_to_be_one():
    text = make_card(uvit({"method": "cs", "reverse": True, "strength": 0.5}), "user/model", CardFacts()).text
    assert "kappa^(N-i+1)" in text
    assert "strength 0.5" in text


def test_it_says_what_is_known_and_nothing_else(pipe):
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
    for word in ("Training", "Results", "samples", "None"):
        assert word not in unknown.text
    assert unknown.data.license is None


def test_the_tags_are_those_of_the_task(pipe, tiny_stable_diffusion):
    data = make_card(pipe, "user/model", CardFacts()).data
    assert data.library_name == "diffusers"
    assert data.pipeline_tag == "unconditional-image-generation"
    assert data.tags == ["diffusers", "scalelong", "skip-scaling"]
    apply_skip_scaling(tiny_stable_diffusion, "cs")
    assert make_card(tiny_stable_diffusion, "user/model", CardFacts()).data.pipeline_tag == "text-to-image"


class TestSnippet:
    def test_of_a_pipeline_of_ours(self, pipe):
        text = make_card(pipe, "user/model", CardFacts(), load_options={"revision": "ema"}).text
        assert "from scalelong_diffusers import ScaleLongClassConditionalPipeline\n" in text
        assert 'ScaleLongClassConditionalPipeline.from_pretrained("user/model", revision="ema")\n' in text
        assert "image = pipe(0).images[0]\n" in text

    def test_of_a_stock_pipeline_it_imports_the_package(self, ddpm, tiny_stable_diffusion):
        pipe = DDPMPipeline(ddpm.build_scaled("cs"), DDPMScheduler())
        text = make_card(pipe, "user/model", CardFacts()).text
        assert "import scalelong_diffusers " in text
        assert "from diffusers import DDPMPipeline\n" in text
        apply_skip_scaling(tiny_stable_diffusion, "cs")
        assert isinstance(tiny_stable_diffusion, StableDiffusionPipeline)
        assert 'pipe("a photograph")' in make_card(tiny_stable_diffusion, "user/model", CardFacts()).text

    def test_of_a_model(self):
        assert 'model = UViTModel.from_pretrained("user/model")\n' in make_card(uvit(), "user/model", CardFacts()).text

    def test_of_a_pipeline_that_needs_an_image_it_ends_after_loading(self, tiny_stable_diffusion):
        apply_skip_scaling(tiny_stable_diffusion, "cs")
        pipe = StableDiffusionImg2ImgPipeline(**tiny_stable_diffusion.components, requires_safety_checker=False)
        card = make_card(pipe, "user/model", CardFacts())
        assert 'pipe = StableDiffusionImg2ImgPipeline.from_pretrained("user/model")\n```' in card.text
        assert card.data.pipeline_tag is None

    def test_so_it_does_of_a_pipeline_of_text_that_can_not_read(self, tiny_clip):
        unet = uvit(cross_attention_dim=16, context_length=12)
        card = make_card(ScaleLongTextToImagePipeline(unet, DDIMScheduler()), "user/model", CardFacts())
        assert 'pipe = ScaleLongTextToImagePipeline.from_pretrained("user/model")\n```' in card.text
        assert card.data.pipeline_tag is None
        whole = make_card(ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip), "user/model", CardFacts())
        assert 'pipe("a photograph")' in whole.text


@pytest.mark.parametrize(
    ("attention", "tag"), [("CrossAttn", "text-to-image"), ("", "unconditional-image-generation")]
)
def test_a_model_is_of_text_where_a_block_attends_to_it(attention, tag):
    blocks = {"down_block_types": (f"{attention}DownBlock2D",), "up_block_types": (f"{attention}UpBlock2D",)}
    sizes = {"block_out_channels": (16,), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 16}
    model = ScaleLongUNet2DConditionModel(**blocks, **sizes, mid_block_type=None, attention_head_dim=4)
    assert make_card(model, "user/model", CardFacts()).data.pipeline_tag == tag


def test_a_compiled_unet_is_seen_through(pipe):
    expected = str(make_card(pipe, "user/model", CardFacts()))
    pipe.unet = torch.compile(pipe.unet)
    assert str(make_card(pipe, "user/model", CardFacts())) == expected


def test_a_table_keeps_its_shape_whatever_is_in_it():
    text = make_card(uvit(), "user/model", CardFacts(metrics={"FID | IS": "2.9\n| 9.1"})).text
    assert "| FID \\| IS | 2.9 \\| 9.1 |\n" in text


class TestTextOfPeople:
    def test_it_stays_around_what_is_written_anew(self, pipe):
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

    def test_their_task_and_license_stay(self, pipe):
        previous = "---\nlicense: openrail\npipeline_tag: image-to-image\n---\nMy model.\n"
        card = make_card(pipe, "user/model", CardFacts(), previous=previous)
        assert (card.data.license, card.data.pipeline_tag) == ("openrail", "image-to-image")
        assert card.text.startswith("My model.\n\n<!-- scalelong:")

    def test_pushed_again_it_is_the_same(self, pipe):
        once = str(make_card(pipe, "user/model", CardFacts()))
        assert str(make_card(pipe, "user/model", CardFacts(), previous=once)) == once
        assert str(ModelCard(once)) == once

    def test_it_stays_where_the_mark_of_the_end_was_removed(self, pipe):
        first = str(make_card(pipe, "user/model", CardFacts(metrics={"FID": 9.9})))
        previous = first.replace("<!-- scalelong: end -->", "On bias.")
        for fid in (3.1, 2.7):
            previous = str(make_card(pipe, "user/model", CardFacts(metrics={"FID": fid}), previous=previous))
        assert "On bias." in previous
        assert "| FID | 2.7 |" in previous
        assert "3.1" not in previous

    def test_metadata_that_can_not_be_read_is_refused_with_the_name_of_the_card(self, pipe):
        with pytest.raises(
            ValueError, match=r"^the README\.md of user/model begins with metadata that can not"
        ) as error:
            make_card(pipe, "user/model", CardFacts(), previous="---\ntags: [a\n---\nMy model.\n")
        assert "\n" not in str(error.value)


def test_an_unknown_fact_is_met_with_the_one_that_was_meant():
    with pytest.raises(
        ValueError, match=r"unknown card field 'metric' \(did you mean 'metrics'\?\); accepted: preset, "
    ):
        CardFacts.parse({"metric": {}})
    assert CardFacts.parse(None) == CardFacts()


def test_it_names_the_model_that_was_fine_tuned_and_keeps_the_name(pipe):
    card = make_card(pipe, "user/model", CardFacts(base_model="some/base"))
    assert (card.data.base_model, card.data.base_model_relation) == ("some/base", "finetune")
    again = make_card(pipe, "user/model", CardFacts(), previous=str(card))
    assert (again.data.base_model, again.data.base_model_relation) == ("some/base", "finetune")
