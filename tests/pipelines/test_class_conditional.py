"""Class-conditional sampling: classes by number and by name, and guidance."""

import pytest
import torch
from diffusers import DDIMScheduler

from scalelong_diffusers import ScaleLongClassConditionalPipeline, UserError


NAMES = ["cat", "dog", "bird", "horse"]


@pytest.fixture
def pipe(build, quiet):
    unet = build("UViTModel", "classes")
    return quiet(ScaleLongClassConditionalPipeline, unet, DDIMScheduler(), class_names=NAMES, null_class=4)


def draw(pipe, labels, generators, **kwargs):
    return pipe(labels, num_inference_steps=2, generator=generators, output_type="pt", **kwargs).images


def test_different_classes_give_different_images(model_of_classes, quiet, generators):
    pipe = quiet(ScaleLongClassConditionalPipeline, model_of_classes, DDIMScheduler())
    assert pipe.num_classes == 5
    one, other = draw(pipe, [0, 3], generators(0, 0))
    assert not torch.allclose(one, other, atol=1e-4)


def test_accepts_names_and_numbers(pipe, generators):
    expected = draw(pipe, 1, generators(0))
    for label in ("dog", ["dog"], [1], torch.tensor([1]), torch.tensor(1).numpy()[None]):
        assert torch.equal(draw(pipe, label, generators(0)), expected)
    assert pipe.class_ids(["dog", 0, "horse"]) == [1, 0, 3]
    assert pipe.num_classes == 4


def test_samples_the_null_class(pipe, generators):
    unguided = draw(pipe, 4, generators(0))
    assert not torch.allclose(unguided, draw(pipe, 0, generators(0)), atol=1e-4)


def test_rejects_a_name_of_two_classes(build):
    names = ["crane", "dog", "crane", "horse"]
    pipe = ScaleLongClassConditionalPipeline(
        build("UViTModel", "classes"), DDIMScheduler(), class_names=names, null_class=4
    )
    assert pipe.class_ids(["dog", 2]) == [1, 2]
    with pytest.raises(UserError, match=r"class 'crane' is ambiguous \(\[0, 2\]\); accepted: 0\.\.3"):
        pipe.class_ids("crane")


def test_num_images_per_prompt(pipe, generators, count_calls):
    calls = count_calls(pipe.unet)
    images = draw(pipe, ["cat", "dog"], generators(0, 1, 2, 3), num_images_per_prompt=2)
    assert calls.inputs[0][1]["class_labels"].tolist() == [0, 0, 1, 1]
    assert images.shape[0] == 4


class TestGuidance:
    def test_runs_the_model_once_per_step(self, pipe, generators, count_calls):
        calls = count_calls(pipe.unet)
        draw(pipe, ["cat", "dog"], generators(0, 1), guidance_scale=4)
        assert [kwargs["class_labels"].tolist() for _, kwargs in calls.inputs] == [[4, 4, 0, 1]] * 2

    def test_is_off_up_to_scale_one(self, pipe, generators, count_calls):
        calls = count_calls(pipe.unet)
        for scale in (0, 0.5, 1):
            draw(pipe, ["cat", "dog"], generators(0, 1), guidance_scale=scale)
        assert [kwargs["class_labels"].tolist() for _, kwargs in calls.inputs] == [[0, 1]] * 6

    @pytest.mark.parametrize("rescale", [0.0, 0.6])
    def test_equals_the_formula(self, pipe, generators, rescale):
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

    def test_a_batch_equals_single_images(self, pipe, generators):
        together = draw(pipe, NAMES, generators(0, 1, 2, 3), guidance_scale=4)
        for k, name in enumerate(NAMES):
            alone = draw(pipe, name, generators(k), guidance_scale=4)
            assert (together[k] - alone[0]).abs().max() <= 1 / 255


def test_saves_names_and_null_class(pipe, tmp_path):
    assert pipe.config.null_class == 4
    assert list(pipe.config.class_names.values()) == NAMES
    pipe.save_pretrained(tmp_path)
    again = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path)
    assert again.config.null_class == 4
    assert again.config.class_names == {"0": "cat", "1": "dog", "2": "bird", "3": "horse"}
    assert again.class_ids("horse") == [3]


def test_keeps_the_order_of_more_than_ten_names(build, tmp_path):
    """The saved config is sorted by text, so 10 comes before 2."""
    names = [f"kind {k}" for k in range(12)]
    unet = build("UViTModel", "classes", num_class_embeds=12)
    ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), class_names=names).save_pretrained(tmp_path)
    again = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path)
    assert list(again.config.class_names.values()) == names
    assert again.class_ids("kind 2") == [2]
