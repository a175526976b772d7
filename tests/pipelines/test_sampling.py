"""The sampling loop: all models and schedulers, and the arguments that all pipelines share."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, DDPMScheduler, EulerDiscreteScheduler

from scalelong_diffusers import ScaleLongClassConditionalPipeline, ScaleLongUnconditionalPipeline
from scalelong_diffusers.pipelines.base import NonFiniteImages


SCHEDULERS = {
    "DDPMScheduler": {},
    "DDIMScheduler": {},
    "DPMSolverMultistepScheduler": {},
    "DPMSolverSinglestepScheduler": {"lower_order_final": True},
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "UniPCMultistepScheduler": {},
    "HeunDiscreteScheduler": {},
    "LCMScheduler": {},
    "TCDScheduler": {},
    "PNDMScheduler": {},
    "DEISMultistepScheduler": {},
    "EDMEulerScheduler": {},
}


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    return (images * 255).round()


class TestAgainstStockPipelines:
    def test_equals_ddpm_pipeline(self, build, quiet, generators):
        unet = build("UNet2DModel", "nothing")
        stock = quiet(DDPMPipeline, unet, DDPMScheduler())
        ours = quiet(ScaleLongUnconditionalPipeline, unet, DDPMScheduler())
        arguments = {"batch_size": 2, "num_inference_steps": 5, "output_type": "np"}
        expected = stock(**arguments, generator=generators(0)[0]).images
        np.testing.assert_allclose(ours(**arguments, generator=generators(0)[0]).images, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("eta", [0.0, 0.7])
    def test_equals_ddim_pipeline(self, build, quiet, generators, eta):
        unet = build("scaled UNet2DModel", "nothing")
        stock = quiet(DDIMPipeline, unet, DDIMScheduler())
        ours = quiet(ScaleLongUnconditionalPipeline, unet, stock.scheduler)
        arguments = {"batch_size": 2, "num_inference_steps": 5, "eta": eta, "output_type": "np"}
        expected = stock(**arguments, generator=generators(0)[0]).images
        np.testing.assert_allclose(ours(**arguments, generator=generators(0)[0]).images, expected, rtol=0, atol=1e-5)


class TestModelsAndSchedulers:
    def test_samples_all_models(self, model_of_nothing, quiet, generators):
        pipe = quiet(ScaleLongUnconditionalPipeline, model_of_nothing, DDIMScheduler())
        images = pipe(batch_size=2, num_inference_steps=3, generator=generators(0, 1), output_type="pt").images
        assert images.shape == (2, 3, 8, 8)
        assert 0 <= images.min() < images.max() <= 1
        assert not torch.allclose(images[0], images[1], atol=0.1)

    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_batch_equals_single_images(self, name, build, quiet, generators):
        scheduler = getattr(diffusers, name)(**SCHEDULERS[name])
        pipe = quiet(ScaleLongUnconditionalPipeline, build("scaled UNet2DModel", "nothing"), scheduler)
        arguments = {"num_inference_steps": 4, "output_type": "pt"}
        together = pipe(batch_size=3, generator=generators(0, 1, 2), **arguments).images
        for k in range(3):
            alone = pipe(generator=generators(k)[0], **arguments).images
            assert (as_bytes(together[k]) - as_bytes(alone[0])).abs().max() <= 1, k
        assert not torch.allclose(together[0], together[1], atol=0.1)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_keeps_the_dtype_of_the_model_in_all_steps(self, dtype, build, quiet, generators, count_calls):
        unet = build("UViTModel", "nothing").to(dtype)
        calls = count_calls(unet)
        for name, config in SCHEDULERS.items():
            pipe = quiet(ScaleLongUnconditionalPipeline, unet, getattr(diffusers, name)(**config))
            latents = pipe(num_inference_steps=4, generator=generators(0)[0], output_type="latent").images
            assert latents.dtype == dtype, name
        assert {args[0].dtype for args, _ in calls.inputs} == {dtype}

    def test_the_scheduler_scales_input_and_initial_noise(self, build, quiet, generators, count_calls):
        unet = build("UNet2DModel", "nothing")
        calls = count_calls(unet)
        noise = torch.randn(1, 3, 8, 8, generator=generators(0)[0])
        scheduler = EulerDiscreteScheduler()
        quiet(ScaleLongUnconditionalPipeline, unet, scheduler)(num_inference_steps=2, latents=noise)
        sigma = scheduler.sigmas[0]
        expected = noise * scheduler.init_noise_sigma / (sigma**2 + 1) ** 0.5
        torch.testing.assert_close(calls.inputs[0][0][0], expected)

    @pytest.mark.parametrize("sizes", [{"height": 16, "width": 24}, {"latents": torch.zeros(1, 3, 16, 24)}])
    def test_custom_sizes(self, model_of_nothing, quiet, sizes):
        pipe = quiet(ScaleLongUnconditionalPipeline, model_of_nothing, DDIMScheduler())
        assert pipe(num_inference_steps=1, output_type="np", **sizes).images.shape == (1, 16, 24, 3)


class TestTimesteps:
    def test_custom_timesteps(self, build, quiet, count_calls):
        unet = build("UNet2DModel", "nothing")
        calls = count_calls(unet)
        quiet(ScaleLongUnconditionalPipeline, unet, DDPMScheduler())(timesteps=[900, 400, 30])
        assert [int(args[1]) for args, _ in calls.inputs] == [900, 400, 30]

    def test_custom_sigmas(self, build, quiet, count_calls):
        unet = build("UNet2DModel", "nothing")
        calls = count_calls(unet)
        pipe = quiet(ScaleLongUnconditionalPipeline, unet, EulerDiscreteScheduler())
        pipe(sigmas=[10.0, 3.0, 0.5, 0.0])
        assert len(calls) == 3
        torch.testing.assert_close(pipe.scheduler.sigmas, torch.tensor([10.0, 3.0, 0.5, 0.0]))

    def test_passes_eta_only_to_schedulers_that_accept_it(self, build, quiet, generators):
        unet = build("UNet2DModel", "nothing")

        def draw(scheduler, eta):
            pipe = quiet(ScaleLongUnconditionalPipeline, unet, scheduler)
            return pipe(num_inference_steps=3, eta=eta, generator=generators(0)[0], output_type="pt").images

        assert not torch.allclose(draw(DDIMScheduler(), 0.0), draw(DDIMScheduler(), 1.0), atol=0.01)
        assert torch.equal(draw(EulerDiscreteScheduler(), 0.0), draw(EulerDiscreteScheduler(), 1.0))


class TestLearnedVariance:
    """Models that predict a variance: DDPM uses it, other schedulers get only the mean."""

    def test_ddpm_uses_the_variance(self, build, quiet, generators):
        unet = build("UNet2DModel", "nothing", out_channels=6)
        scheduler = DDPMScheduler(variance_type="learned_range", clip_sample=False)
        images = quiet(ScaleLongUnconditionalPipeline, unet, scheduler)(
            num_inference_steps=3, generator=generators(0)[0], output_type="latent"
        ).images
        generator = generators(0)[0]
        expected = torch.randn(1, 3, 8, 8, generator=generator)
        scheduler.set_timesteps(3)
        with torch.no_grad():
            for t in scheduler.timesteps:
                expected = scheduler.step(unet(expected, t).sample, t, expected, generator=generator).prev_sample
        torch.testing.assert_close(images, expected)

    @pytest.mark.parametrize("scheduler", [DDIMScheduler(), DDPMScheduler(), EulerDiscreteScheduler()], ids=repr)
    def test_other_schedulers_get_the_mean(self, build, quiet, generators, scheduler):
        both = build("UNet2DModel", "nothing", out_channels=6)
        mean = build("UNet2DModel", "nothing")
        weights = both.state_dict() | {
            f"conv_out.{k}": both.state_dict()[f"conv_out.{k}"][:3] for k in ("weight", "bias")
        }
        mean.load_state_dict(weights)
        drawn = [
            quiet(ScaleLongUnconditionalPipeline, unet, scheduler)(
                num_inference_steps=3, generator=generators(0)[0], output_type="pt"
            ).images
            for unet in (both, mean)
        ]
        torch.testing.assert_close(*drawn)

    def test_guidance_keeps_the_variance_of_the_class(self, build, quiet, generators):
        unet = build("UNet2DModel", "classes", out_channels=6)
        scheduler = DDPMScheduler(variance_type="learned_range", clip_sample=False)
        pipe = quiet(ScaleLongClassConditionalPipeline, unet, scheduler, null_class=4)
        latents = torch.randn(1, 3, 8, 8, generator=generators(0)[0])
        generator = generators(1)[0]
        drawn = pipe(
            2, guidance_scale=3, num_inference_steps=1, latents=latents, generator=generator, output_type="latent"
        )
        scheduler.set_timesteps(1)
        t = scheduler.timesteps[0]
        with torch.no_grad():
            none, some = (unet(latents, t, class_labels=torch.tensor([label])).sample for label in (4, 2))
        guided = none[:, :3] + 3 * (some[:, :3] - none[:, :3])
        output = torch.cat([guided, some[:, 3:]], dim=1)
        expected = scheduler.step(output, t, latents, generator=generators(1)[0]).prev_sample
        torch.testing.assert_close(drawn.images, expected)


class TestLatents:
    def test_decodes_with_the_vae(self, build, quiet, tiny_vae, generators):
        unet = build("UViTModel", "nothing", in_channels=4)
        pipe = quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler(), vae=tiny_vae)
        latents = pipe(num_inference_steps=2, generator=generators(0)[0], output_type="latent").images
        assert latents.shape == (1, 4, 8, 8)
        images = pipe(num_inference_steps=2, generator=generators(0)[0], output_type="pt").images
        with torch.no_grad():
            expected = tiny_vae.decode(latents / tiny_vae.config.scaling_factor).sample
        torch.testing.assert_close(images, (expected / 2 + 0.5).clamp(0, 1))
        assert images.shape == (1, 3, 16, 16)

    def test_latent_scale_overrides_the_scaling_factor_of_the_vae(self, build, quiet, tiny_vae, generators):
        tiny_vae.register_to_config(shift_factor=0.3)
        unet = build("UViTModel", "nothing", in_channels=4)
        pipe = quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler(), vae=tiny_vae, latent_scale=0.2301)
        latents = pipe(num_inference_steps=2, generator=generators(0)[0], output_type="latent").images
        images = pipe(num_inference_steps=2, generator=generators(0)[0], output_type="pt").images
        with torch.no_grad():
            expected = tiny_vae.decode(latents / 0.2301 + 0.3).sample
        torch.testing.assert_close(images, (expected / 2 + 0.5).clamp(0, 1))

    def test_starts_from_given_latents(self, build, quiet, generators):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
        noise = torch.randn(2, 3, 8, 8, generator=generators(3)[0])
        given = pipe(batch_size=2, num_inference_steps=2, latents=noise, output_type="pt").images
        drawn = pipe(batch_size=2, num_inference_steps=2, generator=generators(3)[0], output_type="pt").images
        assert torch.equal(given, drawn)


class TestOutput:
    @pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
    def test_pil(self, build, quiet, channels, mode):
        unet = build("UViTModel", "nothing", in_channels=channels)
        images = quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler())(
            batch_size=2, num_inference_steps=1
        ).images
        assert [(image.mode, image.size) for image in images] == [(mode, (8, 8))] * 2

    def test_output_types_hold_the_same_image(self, build, quiet, generators):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
        drawn = {
            kind: pipe(num_inference_steps=2, generator=generators(0)[0], output_type=kind).images
            for kind in ("pil", "np", "pt", "latent")
        }
        np.testing.assert_array_equal(drawn["np"][0], drawn["pt"][0].permute(1, 2, 0).numpy())
        np.testing.assert_array_equal(np.asarray(drawn["pil"][0]), (drawn["np"][0] * 255).round().astype("uint8"))
        torch.testing.assert_close(drawn["pt"], (drawn["latent"] / 2 + 0.5).clamp(0, 1))

    def test_return_dict_false(self, build, quiet):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
        (images,) = pipe(num_inference_steps=1, return_dict=False)
        assert len(images) == 1

    def test_any_number_of_channels_as_np(self, build, quiet):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UViTModel", "nothing", in_channels=2), DDIMScheduler())
        assert pipe(num_inference_steps=1, output_type="np").images.shape == (1, 8, 8, 2)


class TestCallback:
    def test_is_called_after_every_step(self, build, quiet):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
        seen = []

        def callback(pipe, step, timestep, tensors):
            seen.append((step, int(timestep), list(tensors), pipe.num_timesteps))
            return tensors

        pipe(num_inference_steps=3, callback_on_step_end=callback)
        assert seen == [(0, 666, ["latents"], 3), (1, 333, ["latents"], 3), (2, 0, ["latents"], 3)]

    def test_replaces_tensors(self, build, quiet):
        pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
        ones = pipe(
            num_inference_steps=3,
            output_type="latent",
            callback_on_step_end=lambda pipe, step, t, tensors: {"latents": torch.ones_like(tensors["latents"])},
        ).images
        assert torch.equal(ones, torch.ones(1, 3, 8, 8))

    def test_can_interrupt(self, build, quiet, count_calls):
        unet = build("UNet2DModel", "nothing")
        calls = count_calls(unet)
        pipe = quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler())

        def stop_after_two(pipe, step, timestep, tensors):
            pipe._interrupt = step == 1
            return tensors

        assert len(pipe(num_inference_steps=5, callback_on_step_end=stop_after_two).images) == 1
        assert len(calls) == 2
        pipe(num_inference_steps=5)
        assert len(calls) == 7, "the next call is not interrupted"

    def test_can_end_guidance_as_in_diffusers(self, build, quiet, count_calls):
        unet = build("UViTModel", "classes")
        calls = count_calls(unet)
        pipe = quiet(ScaleLongClassConditionalPipeline, unet, DDIMScheduler(), null_class=4)

        def end_guidance(pipe, step, timestep, tensors):
            if step == 1:
                pipe._guidance_scale = 0.0
                tensors["class_labels"] = tensors["class_labels"].chunk(2)[1]
            return tensors

        pipe(
            [1, 2],
            guidance_scale=3,
            num_inference_steps=4,
            callback_on_step_end=end_guidance,
            callback_on_step_end_tensor_inputs=["class_labels"],
        )
        assert [kwargs["class_labels"].tolist() for _, kwargs in calls.inputs] == [[4, 4, 1, 2]] * 2 + [[1, 2]] * 2


def test_rejects_images_that_are_not_finite(build, quiet):
    unet = build("UNet2DModel", "nothing")
    pipe = quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler(clip_sample=False))
    torch.nn.init.constant_(unet.conv_out.bias, float("inf"))
    for output_type in ("pil", "latent"):
        with pytest.raises(
            NonFiniteImages, match=r"not finite: training diverged, or .* too large for torch\.float32"
        ):
            pipe(num_inference_steps=1, output_type=output_type)


def test_the_progress_bar_counts_the_steps(build, capsys):
    pipe = ScaleLongUnconditionalPipeline(build("UNet2DModel", "nothing"), DDIMScheduler())
    pipe(num_inference_steps=3)
    assert "3/3" in capsys.readouterr().err


def test_a_call_changes_neither_weights_nor_config(model_of_classes, quiet):
    pipe = quiet(ScaleLongClassConditionalPipeline, model_of_classes, DDIMScheduler(), null_class=4)
    weights = {name: value.clone() for name, value in model_of_classes.state_dict().items()}
    configs = dict(pipe.config), dict(pipe.unet.config), dict(pipe.scheduler.config)
    pipe(1, guidance_scale=2, num_inference_steps=2)
    assert (dict(pipe.config), dict(pipe.unet.config), dict(pipe.scheduler.config)) == configs
    for name, value in model_of_classes.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert not pipe.unet.training
