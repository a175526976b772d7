"""Fine-tuning encodes prompts and adds noise as the pipeline does, and rejects other pipelines."""

import logging
import pickle

import diffusers
import numpy as np
import pytest
import torch
from fake_cuda import DEVICE, fake_cuda

from scalelong_diffusers import ScaleLongTextToImagePipeline, UserError, apply_skip_scaling
from scalelong_diffusers.noise import EDMProcess, FlowProcess, trained_process
from scalelong_diffusers.training.stable_diffusion import (
    check_stable_diffusion,
    encode_tokens,
    load_stable_diffusion,
    tokenize_prompts,
)


PROMPTS = ["a red circle", "purple", "a blue square on a table " * 3]


@pytest.fixture
def pipe(build_kind, kind):
    return build_kind(kind)


def tokenized(pipe, prompts):
    return {name: function(prompts) for name, function in tokenize_prompts(pipe).items()}


class TestLoading:
    def test_freezes_everything_except_the_unet(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path)
        loaded = load_stable_diffusion(tmp_path)
        assert type(loaded) is type(pipe)
        trainable = {
            name
            for name, component in loaded.components.items()
            if isinstance(component, torch.nn.Module) and any(p.requires_grad for p in component.parameters())
        }
        assert trainable == {"unet"}
        expected, found = (encode_tokens(p, tokenized(p, PROMPTS))["encoder_hidden_states"] for p in (pipe, loaded))
        assert torch.equal(found, expected)

    def test_keeps_skip_scaling(self, pipe, tmp_path):
        apply_skip_scaling(pipe, "cs").save_pretrained(tmp_path)
        assert load_stable_diffusion(tmp_path).unet.config.skip_scaling["method"] == "cs"

    def test_needs_the_hub_for_an_id(self):
        with pytest.raises(UserError, match="some/sd is not a local folder, and the Hub cannot be reached"):
            load_stable_diffusion("some/sd")

    @pytest.mark.parametrize("class_name", ["FluxPipeline", "DiTPipeline", "StableDiffusionInpaintPipeline"])
    def test_rejects_other_pipelines_before_loading_them(self, tmp_path, class_name):
        (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{class_name}"}}')
        with pytest.raises(
            UserError, match=rf"is a {class_name}; only StableDiffusionPipeline or StableDiffusionXLPipeline"
        ):
            load_stable_diffusion(tmp_path)

    def test_rejects_an_incomplete_folder(self, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path)
        (tmp_path / "text_encoder").rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=r"no file named .* found in directory"):
            load_stable_diffusion(tmp_path)

    def test_rejects_weights_of_another_config(self, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path)
        file = tmp_path / "text_encoder" / "config.json"
        file.write_text(file.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
        with pytest.raises(UserError, match=r"weights in .* do not fit their config\.json"):
            load_stable_diffusion(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
    def test_rejects_a_tokenizer_without_its_files(self, build_kind, tmp_path, name):
        build_kind("sdxl").save_pretrained(tmp_path)
        (tmp_path / name / "tokenizer.json").unlink()
        with pytest.raises(UserError, match=r"ends texts with .* they do not belong together"):
            load_stable_diffusion(tmp_path)


class TestChecks:
    def rejects(self, pipe, message):
        with pytest.raises(UserError, match=message):
            check_stable_diffusion(pipe)

    def test_rejects_our_own_pipelines(self, build_kind):
        stock = build_kind("sd1")
        pipe = ScaleLongTextToImagePipeline(stock.unet, stock.scheduler, stock.text_encoder, stock.tokenizer)
        self.rejects(pipe, "is a ScaleLongTextToImagePipeline; only StableDiffusionPipeline or")

    @pytest.mark.parametrize("name", ["text_encoder", "vae"])
    def test_rejects_a_pipeline_without_a_component(self, build_kind, name):
        pipe = build_kind("sd1")
        setattr(pipe, name, None)
        self.rejects(pipe, f"this StableDiffusionPipeline has no {name}")

    def test_rejects_another_unet_class(self, build_kind, ddpm):
        pipe = build_kind("sd1")
        pipe.unet = ddpm.build()
        self.rejects(pipe, "has a UNet2DModel that must take encoder_hidden_states but takes no condition")

    def test_rejects_inpainting(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(in_channels=9)
        self.rejects(pipe, r"takes 9 channels \(an inpainting model .*\), but the vae's latents have 4")

    def test_rejects_a_text_encoder_of_another_width(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(cross_attention_dim=24)
        self.rejects(pipe, "takes text of width 24, but the text encoders have 16")

    def test_rejects_two_text_encoders_of_another_width(self, build_kind, cases):
        pipe = build_kind("sdxl")
        pipe.unet = cases["sdxl"].build()
        self.rejects(pipe, r"takes text of width 16, but the text encoders have 16 \+ 8")

    def test_rejects_a_unet_with_embedded_guidance(self, build_kind, sd):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(time_cond_proj_dim=8)
        self.rejects(pipe, r"must take encoder_hidden_states but takes timestep_cond \(time_cond_proj_dim=8\), enc")

    def test_rejects_the_unet_of_sdxl_in_another_pipeline(self, build_kind, cases):
        pipe = build_kind("sd1")
        pipe.unet = cases["sdxl"].build()
        self.rejects(pipe, "must take encoder_hidden_states but takes added_cond_kwargs")


class TestEncoding:
    def test_equals_encode_prompt_of_the_pipeline(self, pipe):
        prompts = [*PROMPTS, ""]
        arguments = encode_tokens(pipe, tokenized(pipe, prompts))
        expected = pipe.encode_prompt(
            prompts, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        assert torch.equal(arguments["encoder_hidden_states"], expected[0])
        if len(expected) == 4:
            assert torch.equal(arguments["added_cond_kwargs"]["text_embeds"], expected[2])

    def test_different_prompts_give_different_predictions(self, pipe, predict):
        one, other = (
            predict(pipe, encode_tokens(pipe, tokenized(pipe, [prompt]))) for prompt in ("a red circle", "purple")
        )
        assert not torch.allclose(one, other, atol=1e-5)

    def test_the_unet_gets_the_same_arguments_as_in_sampling(self, pipe, draw):
        """Compare with the conditional half of the arguments in the stock pipeline's call."""
        calls = []
        hook = pipe.unet.register_forward_pre_hook(lambda m, args, kwargs: calls.append(kwargs), with_kwargs=True)
        draw(pipe)
        hook.remove()
        arguments = encode_tokens(pipe, tokenized(pipe, ["a red circle"]))
        sampled = {**calls[0], **(calls[0]["added_cond_kwargs"] or {})}
        trained = {**arguments, **arguments.get("added_cond_kwargs", {})}
        for name in trained.keys() - {"added_cond_kwargs"}:
            torch.testing.assert_close(sampled[name][-1:], trained[name], rtol=0, atol=1e-6, msg=name)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_dropped_prompts_equal_the_unconditional_ones_of_guidance(self, pipe, zeros):
        pipe.register_to_config(force_zeros_for_empty_prompt=zeros)
        ids = tokenized(pipe, PROMPTS)
        dropped = encode_tokens(pipe, ids, torch.tensor([False, True, False]))
        kept = encode_tokens(pipe, ids)
        _, null, *pooled = pipe.encode_prompt(
            "x", device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True
        )
        states = dropped["encoder_hidden_states"]
        torch.testing.assert_close(states[1], null[0])
        torch.testing.assert_close(states[::2], kept["encoder_hidden_states"][::2])
        if pooled:
            assert bool((states[1] == 0).all()) == zeros
            torch.testing.assert_close(dropped["added_cond_kwargs"]["text_embeds"][1], pooled[1][0])
            torch.testing.assert_close(
                dropped["added_cond_kwargs"]["text_embeds"][::2], kept["added_cond_kwargs"]["text_embeds"][::2]
            )

    def test_sdxl_gets_the_resolution(self, build_kind):
        pipe = build_kind("sdxl")
        ids = tokenized(pipe, PROMPTS[:2])
        for side, resolution in ((16, None), (64, 64)):
            time_ids = encode_tokens(pipe, ids, resolution=resolution)["added_cond_kwargs"]["time_ids"]
            assert time_ids.tolist() == [[side, side, 0, 0, side, side]] * 2

    def test_the_tokenizing_functions_can_be_pickled(self, pipe):
        expected = tokenized(pipe, PROMPTS)
        functions = pickle.loads(pickle.dumps(tokenize_prompts(pipe)))
        assert functions.keys() == expected.keys()
        assert all(torch.equal(function(PROMPTS), expected[name]) for name, function in functions.items())

    def test_expands_tokens_of_textual_inversion(self, build_kind):
        pipe = build_kind("sd1")
        pipe.tokenizer.add_tokens(["<cat>", "<cat>_1"])
        pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))
        ids = tokenized(pipe, ["a <cat>"])
        assert ids["input_ids"][0, 2:4].tolist() == pipe.tokenizer.convert_tokens_to_ids(["<cat>", "<cat>_1"])
        expected, _ = pipe.encode_prompt("a <cat>", "cpu", 1, do_classifier_free_guidance=False)
        assert torch.equal(encode_tokens(pipe, ids)["encoder_hidden_states"], expected)

    @pytest.mark.parametrize("zeros", [True, False])
    def test_copies_nothing_from_or_to_the_host(self, pipe, kind, zeros):
        if kind == "sdxl":
            pipe.register_to_config(force_zeros_for_empty_prompt=zeros)
        ids = tokenized(pipe, PROMPTS)
        with fake_cuda() as mode:
            pipe.to(DEVICE)
            ids = {name: batch.to(DEVICE) for name, batch in ids.items()}
            dropped = torch.tensor([False, True, False]).to(DEVICE)
            encode_tokens(pipe, ids, dropped, 64)  # copies the ids of the empty prompt
            mode.host_inputs.clear()
            arguments = encode_tokens(pipe, ids, dropped, 64)
            assert not mode.host_inputs
            latents = torch.zeros(3, 4, 8, 8, device=DEVICE)
            sample = pipe.unet(latents, torch.ones(3, device=DEVICE), **arguments).sample
        assert sample.device == DEVICE


class TestSchedule:
    def test_equals_the_schedule_of_the_pipeline(self, pipe, kind, caplog):
        with caplog.at_level(logging.WARNING):
            schedule = trained_process(pipe).scheduler
        assert not caplog.records
        assert type(schedule) is diffusers.DDPMScheduler
        torch.testing.assert_close(schedule.alphas_cumprod, pipe.scheduler.alphas_cumprod)
        assert schedule.config.prediction_type == ("v_prediction" if kind == "sd2" else "epsilon")
        assert (schedule.alphas_cumprod[-1] == 0) == (kind == "sd2")

    def test_custom_betas(self, build_kind):
        pipe = build_kind("sd1")
        pipe.scheduler = diffusers.DDIMScheduler(trained_betas=np.linspace(0.1, 0.2, 10), num_train_timesteps=10)
        torch.testing.assert_close(trained_process(pipe).scheduler.betas, pipe.scheduler.betas)

    def test_processes_without_betas(self, build_kind):
        pipe = build_kind("sd1")
        pipe.scheduler = diffusers.EDMDPMSolverMultistepScheduler(sigma_data=0.8)
        process = trained_process(pipe)
        assert isinstance(process, EDMProcess)
        assert process.sigma_data == 0.8
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3)
        process = trained_process(pipe)
        assert isinstance(process, FlowProcess)
        assert process.shift == 3
        with pytest.raises(UserError, match="snr_gamma 5 has no effect with prediction_type flow"):
            trained_process(pipe, snr_gamma=5)

    @pytest.mark.parametrize(
        ("scheduler", "message"),
        [
            (
                diffusers.EDMEulerScheduler(prediction_type="v_prediction"),
                "cannot train with EDMEulerScheduler, which needs betas",
            ),
            (
                diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
                "of epsilon, v_prediction, sample, got 'flow_prediction'",
            ),
        ],
    )
    def test_rejects_schedulers_without_a_training_schedule(self, build_kind, scheduler, message):
        pipe = build_kind("sd1")
        pipe.scheduler = scheduler
        with pytest.raises(UserError, match=message):
            trained_process(pipe)
