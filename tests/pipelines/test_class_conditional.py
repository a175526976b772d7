"""Classes by number and by name, and guidance away from the null class."""

import pytest
import torch
from diffusers import DDIMScheduler

from scalelong_diffusers import ScaleLongClassConditionalPipeline


NAMES = ["cat", "dog", "bird", "horse"]


@pytest.fixture
def pipe(build, quiet):
    unet = build("UViTModel", "classes")
    return quiet(ScaleLongClassConditionalPipeline, unet, DDIMScheduler(), class_names=NAMES, null_class=4)


def draw(pipe, labels, generators, **kwargs):
    return pipe(labels, num_inference_steps=2, generator=generators, output_type="pt", **kwargs).images


def test_every_model_draws_another_image_for_another_class(model_of_classes, quiet, generators):
    pipe = quiet(ScaleLongClassConditionalPipeline, model_of_classes, DDIMScheduler())
    assert pipe.num_classes == 5
    one, other = draw(pipe, [0, 3], generators(0, 0))
    assert not torch.allclose(one, other, atol=1e-4)


def test_a_class_is_named_or_numbered(pipe, generators):
    expected = draw(pipe, 1, generators(0))
    for label in ("dog", ["dog"], [1], torch.tensor([1]), torch.tensor(1).numpy()[None]):
        assert torch.equal(draw(pipe, label, generators(0)), expected)
    assert pipe.class_ids(["dog", 0, "horse"]) == [1, 0, 3]
    assert pipe.num_classes == 4


def test_the_null_class_may_be_asked_for(pipe, generators):
    unguided = draw(pipe, 4, generators(0))
    assert not torch.allclose(unguided, draw(pipe, 0, generators(0)), atol=1e-4)


def test_a_name_that_two_classes_share_is_met_with_their_numbers(build):
    names = ["crane", "dog", "crane", "horse"]
    pipe = ScaleLongClassConditionalPipeline(
        build("UViTModel", "classes"), DDIMScheduler(), class_names=names, null_class=4
    )
    assert pipe.class_ids(["dog", 2]) == [1, 2]
    with pytest.raises(ValueError, match=r"'crane' is the name of several classes: give one of the numbers \[0, 2\]"):
        pipe.class_ids("crane")


def test_several_images_of_each_class(pipe, generators, count_calls):
    calls = count_calls(pipe.unet)
    images = draw(pipe, ["cat", "dog"], generators(0, 1, 2, 3), num_images_per_prompt=2)
    assert calls.inputs[0][1]["class_labels"].tolist() == [0, 0, 1, 1]
    assert images.shape[0] == 4


class TestGuidance:
    def test_one_call_a_step_has_both(self, pipe, generators, count_calls):
        calls = count_calls(pipe.unet)
        draw(pipe, ["cat", "dog"], generators(0, 1), guidance_scale=4)
        assert [kwargs["class_labels"].tolist() for _, kwargs in calls.inputs] == [[4, 4, 0, 1]] * 2

    @pytest.mark.parametrize("scale", [0, 0.5, 1])
    def test_one_is_off_and_runs_the_model_once(self, pipe, generators, count_calls, scale):
        calls = count_calls(pipe.unet)
        draw(pipe, ["cat", "dog"], generators(0, 1), guidance_scale=scale)
        assert [kwargs["class_labels"].tolist() for _, kwargs in calls.inputs] == [[0, 1]] * 2

    @pytest.mark.parametrize("rescale", [0.0, 0.6])
    def test_it_is_the_formula(self, pipe, generators, rescale):
        latents = torch.randn(1, 3, 8, 8, generator=generators(0)[0])
        drawn = pipe(
            "bird",
            guidance_scale=3.5,
            guidance_rescale=rescale,
            num_inference_steps=3,
            latents=latents,
            output_type="latent",
        ).images
        scheduler = DDIMScheduler()
        scheduler.set_timesteps(3)
        with torch.no_grad():
            for t in scheduler.timesteps:
                none, bird = (pipe.unet(latents, t, class_labels=torch.tensor([label])).sample for label in (4, 2))
                guided = none + 3.5 * (bird - none)
                contrast = guided / guided.std() * bird.std()
                output = rescale * contrast + (1 - rescale) * guided
                latents = scheduler.step(output, t, latents).prev_sample
        torch.testing.assert_close(drawn, latents)

    def test_a_guided_batch_equals_its_images_made_one_by_one(self, pipe, generators):
        together = draw(pipe, NAMES, generators(0, 1, 2, 3), guidance_scale=4)
        for k, name in enumerate(NAMES):
            alone = draw(pipe, name, generators(k), guidance_scale=4)
            assert (together[k] - alone[0]).abs().max() <= 1 / 255

    def test_without_a_null_class_it_is_refused(self, model_of_classes, quiet):
        pipe = quiet(ScaleLongClassConditionalPipeline, model_of_classes, DDIMScheduler())
        with pytest.raises(
            ValueError, match="guidance_scale=4 needs a null class, and this pipeline has none: take 1"
        ):
            pipe(0, guidance_scale=4)


def test_names_and_null_class_stand_in_the_config(pipe, tmp_path):
    assert pipe.config.null_class == 4
    assert list(pipe.config.class_names.values()) == NAMES
    pipe.save_pretrained(tmp_path)
    again = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path)
    assert again.config.null_class == 4
    assert again.config.class_names == {"0": "cat", "1": "dog", "2": "bird", "3": "horse"}
    assert again.class_ids("horse") == [3]


def test_names_of_more_than_ten_classes_keep_their_order(build, tmp_path):
    """The config is written sorted by text, where 10 comes before 2."""
    names = [f"class of {k}" for k in range(12)]
    unet = build("UViTModel", "classes", num_class_embeds=12)
    ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), class_names=names).save_pretrained(tmp_path)
    again = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path)
    assert list(again.config.class_names.values()) == names
    assert again.class_ids("class of 2") == [2]
