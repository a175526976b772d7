"""Existing pipelines are encoded and noised in fine-tuning as they are in sampling, and others are refused."""

import logging

import diffusers
import numpy as np
import pytest
import torch

from scalelong_diffusers import ScaleLongTextToImagePipeline, apply_skip_scaling
from scalelong_diffusers.training.stable_diffusion import (
    check_stable_diffusion,
    encode_prompts,
    load_stable_diffusion,
    training_schedule,
)


PROMPTS = ["a red circle", "purple", "a blue square on a table " * 3]


@pytest.fixture
def pipe(build_kind, kind):
    return build_kind(kind)


class TestLoading:
    def test_everything_but_the_unet_is_frozen(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path)
        loaded = load_stable_diffusion(tmp_path)
        assert type(loaded) is type(pipe)
        asking = {
            name
            for name, component in loaded.components.items()
            if isinstance(component, torch.nn.Module) and any(p.requires_grad for p in component.parameters())
        }
        assert asking == {"unet"}
        expected, found = (encode_prompts(p, PROMPTS)["encoder_hidden_states"] for p in (pipe, loaded))
        assert torch.equal(found, expected)

    def test_one_that_is_scaled_is_loaded_scaled(self, pipe, tmp_path):
        apply_skip_scaling(pipe, "cs").save_pretrained(tmp_path)
        assert load_stable_diffusion(tmp_path).unet.config.skip_scaling["method"] == "cs"

    def test_one_that_is_not_at_hand_offline(self):
        with pytest.raises(OSError, match="some/sd is no local folder, and the Hub can not be reached"):
            load_stable_diffusion("some/sd")

    @pytest.mark.parametrize("class_name", ["FluxPipeline", "DiTPipeline", "StableDiffusionInpaintPipeline"])
    def test_another_pipeline_is_refused_by_name_before_it_is_loaded(self, tmp_path, class_name):
        (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{class_name}"}}')
        with pytest.raises(ValueError, match=rf"is a {class_name}; .* a StableDiffusionPipeline or a Sta"):
            load_stable_diffusion(tmp_path)

    def test_a_folder_that_is_not_whole(self, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path)
        (tmp_path / "text_encoder").rename(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=r"is not whole: its model_index.json names text_encoder"):
            load_stable_diffusion(tmp_path)

    def test_a_text_encoder_whose_config_is_of_another(self, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path)
        file = tmp_path / "text_encoder" / "config.json"
        file.write_text(file.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
        with pytest.raises(ValueError, match=r"has a component whose weights do not fit its config\.json"):
            load_stable_diffusion(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
    def test_without_the_files_of_a_tokenizer(self, build_kind, tmp_path, name):
        build_kind("sdxl").save_pretrained(tmp_path)
        (tmp_path / name / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match=r"the tokenizer ends .* they do not belong together"):
            load_stable_diffusion(tmp_path)


class TestWhatIsNoStableDiffusion:
    def refused(self, pipe, message):
        with pytest.raises(ValueError, match=message):
            check_stable_diffusion(pipe)

    def test_a_pipeline_of_ours(self, build_kind):
        stock = build_kind("sd1")
        pipe = ScaleLongTextToImagePipeline(stock.unet, stock.scheduler, stock.text_encoder, stock.tokenizer)
        self.refused(pipe, "is a ScaleLongTextToImagePipeline; what can be fine-tuned")

    @pytest.mark.parametrize("name", ["text_encoder", "vae"])
    def test_without_a_component(self, build_kind, name):
        pipe = build_kind("sd1")
        setattr(pipe, name, None)
        self.refused(pipe, f"this StableDiffusionPipeline has no {name}, which fine-tuning needs")

    def test_another_unet(self, build_kind, ddpm):
        pipe = build_kind("sd1")
        pipe.unet = ddpm.build()
        self.refused(pipe, "is a UNet2DConditionModel, got UNet2DModel")

    def test_inpainting(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(in_channels=9)
        self.refused(pipe, r"takes 9 channels \(one for inpainting .*\), and the latents of the vae 4")

    def test_a_text_encoder_of_another_width(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(cross_attention_dim=24)
        self.refused(pipe, "text encoders are 16 wide, but this UNet2DConditionModel takes 24")

    def test_two_encoders_of_another_width(self, build_kind, cases):
        pipe = build_kind("sdxl")
        pipe.unet = cases["sdxl"].build()
        self.refused(pipe, r"text encoders are 16 \+ 8 wide, but this UNet2DConditionModel takes 16")

    def test_a_unet_that_is_guided_from_within(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(time_cond_proj_dim=8)
        self.refused(pipe, r"takes encoder_hidden_states; this .* takes timestep_cond \(time_cond_proj_dim=8\), enc")

    def test_the_unet_of_another_kind(self, build_kind, cases):
        pipe = build_kind("sd1")
        pipe.unet = cases["sdxl"].build()
        self.refused(pipe, "takes encoder_hidden_states; this UNet2DConditionModel takes added_cond_kwargs")


class TestEncoding:
    def test_it_is_that_of_the_pipeline(self, pipe):
        arguments = encode_prompts(pipe, PROMPTS)
        expected = pipe.encode_prompt(
            PROMPTS, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        assert torch.equal(arguments["encoder_hidden_states"], expected[0])
        if len(expected) == 4:
            assert torch.equal(arguments["added_cond_kwargs"]["text_embeds"], expected[2])

    def test_the_unet_takes_it_and_tells_the_prompts_apart(self, pipe, predict):
        one, other = (predict(pipe, encode_prompts(pipe, [prompt])) for prompt in ("a red circle", "purple"))
        assert not torch.allclose(one, other, atol=1e-5)

    def test_the_unet_is_given_what_sampling_gives_it(self, pipe, draw):
        """Of all that the stock pipeline's own call passes to its U-Net, the half with the prompt."""
        given = []
        hook = pipe.unet.register_forward_pre_hook(lambda m, args, kwargs: given.append(kwargs), with_kwargs=True)
        draw(pipe)
        hook.remove()
        arguments = encode_prompts(pipe, ["a red circle"])
        sampled = {**given[0], **(given[0]["added_cond_kwargs"] or {})}
        trained = {**arguments, **arguments.get("added_cond_kwargs", {})}
        for name in trained.keys() - {"added_cond_kwargs"}:
            torch.testing.assert_close(sampled[name][-1:], trained[name], rtol=0, atol=1e-6, msg=name)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_empty_text_is_what_guidance_leads_away_from(self, pipe, zeros):
        pipe.register_to_config(force_zeros_for_empty_prompt=zeros)
        arguments = encode_prompts(pipe, ["a red circle", "", "purple"])
        alone = encode_prompts(pipe, ["a red circle", "purple"])
        _, null, *pooled = pipe.encode_prompt(
            "x", device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True
        )
        states = arguments["encoder_hidden_states"]
        torch.testing.assert_close(states[1], null[0])
        torch.testing.assert_close(states[::2], alone["encoder_hidden_states"])
        if pooled:
            assert bool((states[1] == 0).all()) == zeros
            torch.testing.assert_close(arguments["added_cond_kwargs"]["text_embeds"][1], pooled[1][0])

    def test_sizes_are_told_to_sdxl(self, build_kind):
        pipe = build_kind("sdxl")
        told = (encode_prompts(pipe, PROMPTS[:2], *side)["added_cond_kwargs"]["time_ids"] for side in ((), (64,)))
        assert [ids.tolist() for ids in told] == [[[side, side, 0, 0, side, side]] * 2 for side in (16, 64)]

    def test_a_prompt_that_is_no_text(self, pipe):
        with pytest.raises(TypeError, match="prompts must be texts; that at position 1 is 3"):
            encode_prompts(pipe, ["a", 3])


class TestSchedule:
    def test_it_is_that_of_the_pipeline(self, pipe, kind, caplog):
        with caplog.at_level(logging.WARNING):
            schedule = training_schedule(pipe)
        assert not caplog.records
        assert type(schedule) is diffusers.DDPMScheduler
        torch.testing.assert_close(schedule.alphas_cumprod, pipe.scheduler.alphas_cumprod)
        assert schedule.config.prediction_type == ("v_prediction" if kind == "sd2" else "epsilon")
        assert (schedule.alphas_cumprod[-1] == 0) == (kind == "sd2")

    def test_betas_of_ones_own(self, build_kind):
        pipe = build_kind("sd1")
        pipe.scheduler = diffusers.DDIMScheduler(trained_betas=np.linspace(0.1, 0.2, 10), num_train_timesteps=10)
        torch.testing.assert_close(training_schedule(pipe).betas, pipe.scheduler.betas)

    @pytest.mark.parametrize(
        ("scheduler", "message"),
        [
            (diffusers.FlowMatchEulerDiscreteScheduler(), "FlowMatchEulerDiscreteScheduler has no betas"),
            (
                diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
                "must be one of epsilon, v_prediction, sample, got 'flow_prediction'",
            ),
        ],
    )
    def test_a_scheduler_that_does_not_say(self, build_kind, scheduler, message):
        pipe = build_kind("sd1")
        pipe.scheduler = scheduler
        with pytest.raises(ValueError, match=message):
            training_schedule(pipe)
