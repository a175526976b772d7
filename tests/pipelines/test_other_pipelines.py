"""Stock pipelines of all kinds of models: sampling with scaled skips, and loading in another process."""

from copy import deepcopy

import diffusers
import pytest
import torch
import transformers

from scalelong_diffusers import apply_skip_scaling, remove_skip_scaling, skip_connections


LS = {"method": "ls", "reduction": 4, "init": "paper"}


def embeds(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kandinsky3(cases, **_):
    pipe = diffusers.Kandinsky3Pipeline(None, None, cases["kandinsky3"].build(), diffusers.DDPMScheduler(), None)
    masks = {name: torch.ones(1, 5, dtype=torch.long) for name in ("attention_mask", "negative_attention_mask")}
    prompt = {"prompt_embeds": embeds(1, 5, 16), "negative_prompt_embeds": embeds(1, 5, 16, seed=1)}
    return pipe, {**prompt, **masks, "height": 128, "width": 128, "output_type": "latent"}


def stable_cascade(cases, **_):
    decoder = cases["stable-cascade"].build(effnet_in_channels=4)
    scheduler = diffusers.DDPMWuerstchenScheduler()
    pipe = diffusers.StableCascadeDecoderPipeline(decoder, None, None, scheduler, None, latent_dim_scale=2.0)
    prompt = {"prompt_embeds": embeds(1, 5, 16), "prompt_embeds_pooled": embeds(1, 1, 16)}
    negative = {f"negative_{name}": value + 1 for name, value in prompt.items()}
    return pipe, {"image_embeddings": embeds(1, 4, 4, 4), **prompt, **negative, "output_type": "latent"}


def hunyuan(cases, tiny_vae, **_):
    pipe = diffusers.HunyuanDiTPipeline(
        tiny_vae,
        None,
        None,
        cases["hunyuan-dit"].build(learn_sigma=True),
        diffusers.DDPMScheduler(),
        None,
        None,
        False,
    )
    prompt = {"prompt_embeds": embeds(1, 5, 16), "prompt_embeds_2": embeds(1, 6, 16)}
    masks = {
        "prompt_attention_mask": torch.ones(1, 5).long(),
        "prompt_attention_mask_2": torch.ones(1, 6).long(),
    }
    both = {**prompt, **masks}
    negative = {f"negative_{name}": value for name, value in both.items()}
    size = {"height": 16, "width": 16, "use_resolution_binning": False}
    return pipe, {**both, **negative, **size, "output_type": "latent"}


def dance_diffusion(cases, **_):
    unet = cases["1d"].build(sample_rate=16, in_channels=2)
    pipe = diffusers.DanceDiffusionPipeline(unet, diffusers.IPNDMScheduler())
    return pipe, {"audio_length_in_s": 4.0}


def animate_diff(tiny_stable_diffusion, **_):
    parts = tiny_stable_diffusion.components
    parts = {name: parts[name] for name in ("vae", "text_encoder", "tokenizer", "unet", "scheduler")}
    adapter = diffusers.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=2, motion_norm_num_groups=8, motion_num_attention_heads=2
    )
    # The pipeline converts the U-Net, which is scaled before.
    pipe = diffusers.AnimateDiffPipeline(
        **{**parts, "unet": apply_skip_scaling(parts["unet"], LS)}, motion_adapter=adapter
    )
    return pipe, {"prompt": "a red circle", "num_frames": 2, "height": 16, "width": 16, "output_type": "pt"}


def controlnet_xs(tiny_stable_diffusion, **_):
    parts = tiny_stable_diffusion.components | {"requires_safety_checker": False}
    parts.pop("image_encoder", None)
    unet = apply_skip_scaling(parts["unet"], LS)
    adapter = diffusers.ControlNetXSAdapter.from_unet(
        unet, block_out_channels=[8, 16], conditioning_embedding_out_channels=(8, 8), num_attention_heads=2
    )
    pipe = diffusers.StableDiffusionControlNetXSPipeline(**{**parts, "unet": unet}, controlnet=adapter)
    return pipe, {"prompt": "a red circle", "image": embeds(1, 3, 16, 16).abs(), "output_type": "pt"}


def stable_video_diffusion(cases, tiny_image_encoder, **_):
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2
    )
    encoder, processor = tiny_image_encoder
    unet = cases["spatio-temporal"].build(in_channels=8)
    scheduler = diffusers.EulerDiscreteScheduler()
    pipe = diffusers.StableVideoDiffusionPipeline(vae.eval(), encoder, unet, scheduler, processor)
    size = {"num_frames": 2, "height": 16, "width": 16}
    return pipe, {"image": embeds(1, 3, 16, 16).sigmoid(), **size, "output_type": "latent"}


def audioldm2(cases, tiny_vae, **_):
    torch.manual_seed(0)
    t5 = {"vocab_size": 8, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    gpt2 = {"vocab_size": 8, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    pipe = diffusers.AudioLDM2Pipeline(
        tiny_vae,
        None,
        transformers.T5EncoderModel(transformers.T5Config(**t5)),
        None,
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        None,
        None,
        None,
        cases["audioldm2"].build(),
        diffusers.DDIMScheduler(),
        transformers.SpeechT5HifiGan(transformers.SpeechT5HifiGanConfig(model_in_dim=8, upsample_initial_channel=16)),
    )
    prompt = {"prompt_embeds": embeds(1, 5, 16), "generated_prompt_embeds": embeds(1, 6, 16)}
    masks = {"attention_mask": torch.ones(1, 5).long()}
    both = {**prompt, **masks}
    return pipe, {**both, **{f"negative_{name}": value for name, value in both.items()}, "output_type": "latent"}


def unidiffuser(tiny_vae, tiny_stable_diffusion, tiny_image_encoder, **_):
    torch.manual_seed(0)
    unet = diffusers.UniDiffuserModel(
        text_dim=16, clip_img_dim=16, num_text_tokens=12, num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, num_layers=6, sample_size=8, patch_size=2,
    ).eval()  # fmt: skip
    decoder = diffusers.UniDiffuserTextDecoder(
        prefix_length=12, prefix_inner_dim=16, vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2
    )
    # diffusers cannot save its tied weights.
    decoder.transformer.lm_head.weight = torch.nn.Parameter(decoder.transformer.lm_head.weight.detach().clone())
    text = tiny_stable_diffusion
    pipe = diffusers.UniDiffuserPipeline(
        tiny_vae,
        text.text_encoder,
        *tiny_image_encoder,
        text.tokenizer,
        decoder.eval(),
        None,
        unet,
        diffusers.DPMSolverMultistepScheduler(),
    )
    return pipe, {"prompt": "a red circle", "output_type": "latent"}


@pytest.fixture
def tiny_image_encoder():
    """Return a CLIP vision model of width 16 for images of 16 x 16 pixels, and its processor."""
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return transformers.CLIPVisionModelWithProjection(config).eval(), transformers.CLIPImageProcessorPil(size=16)


PIPELINES = [
    kandinsky3,
    stable_cascade,
    hunyuan,
    dance_diffusion,
    animate_diff,
    controlnet_xs,
    stable_video_diffusion,
    audioldm2,
    unidiffuser,
]

LOAD = """
import json
import sys
import traceback
from pathlib import Path
import torch
import scalelong_diffusers
from diffusers import DiffusionPipeline


def load_and_sample(folder):
    index = json.loads((folder / "pipe" / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipe = DiffusionPipeline.from_pretrained(folder / "pipe", **absent)
    pipe.set_progress_bar_config(disable=True)
    inputs = torch.load(folder / "inputs.pt")
    sample = pipe(**inputs, num_inference_steps=2, generator=torch.Generator().manual_seed(0), return_dict=False)[0]
    return str(scalelong_diffusers.skip_connections(pipe)), torch.as_tensor(sample), ""


for folder in map(Path, sys.argv[1:]):
    try:
        loaded = load_and_sample(folder)
    except Exception:
        loaded = None, None, traceback.format_exc()
    torch.save(loaded, folder / "loaded.pt")
"""


def draw(pipe, inputs):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe(**inputs, num_inference_steps=2, generator=generator, return_dict=False)[0])


@pytest.mark.slow
def test_pipelines_stay_scaled_in_another_process(
    cases, tiny_vae, tiny_stable_diffusion, tiny_image_encoder, in_fresh_process, tmp_path, subtests
):
    parts = {
        "cases": cases,
        "tiny_vae": tiny_vae,
        "tiny_stable_diffusion": tiny_stable_diffusion,
        "tiny_image_encoder": tiny_image_encoder,
    }
    saved = {}
    for build in PIPELINES:
        with subtests.test(build.__name__):
            pipe, inputs = build(**deepcopy(parts))
            apply_skip_scaling(pipe, LS)
            folder = tmp_path / build.__name__
            pipe.save_pretrained(folder / "pipe")
            torch.save(inputs, folder / "inputs.pt")
            saved[folder] = pipe, inputs, draw(pipe, inputs)
    in_fresh_process(LOAD, *saved)  # one process for all pipelines, because its imports take long
    for folder, (pipe, inputs, drawn) in saved.items():
        with subtests.test(folder.name):
            table, sample, error = torch.load(folder / "loaded.pt")
            assert not error, error
            assert table == str(skip_connections(pipe))
            torch.testing.assert_close(sample, drawn, rtol=1e-4, atol=1e-3)
            assert not torch.allclose(draw(remove_skip_scaling(pipe), inputs), drawn, atol=1e-2)


@pytest.mark.parametrize("build", [animate_diff, controlnet_xs], ids=lambda build: build.__name__)
def test_pipeline_that_converts_the_unet_keeps_scaling_and_gates(build, tiny_stable_diffusion):
    unet = apply_skip_scaling(tiny_stable_diffusion.unet, LS)
    with torch.no_grad():
        for parameter in unet.skip_scaler.parameters():
            parameter.normal_()
    pipe, _ = build(tiny_stable_diffusion=tiny_stable_diffusion)
    assert type(pipe.unet).__name__.startswith("ScaleLongUNet")
    assert type(pipe.unet) is not type(unet)
    for name, weight in unet.skip_scaler.state_dict().items():
        assert torch.equal(pipe.unet.skip_scaler.state_dict()[name], weight)


def test_modular_pipeline(tiny_stable_diffusion, tmp_path):
    pipe = diffusers.StableDiffusionXLAutoBlocks().init_pipeline()
    with pytest.raises(ValueError, match="StableDiffusionXLModularPipeline has no model that can be scaled"):
        apply_skip_scaling(pipe, "cs")
    pipe.update_components(unet=tiny_stable_diffusion.unet)
    apply_skip_scaling(pipe, "cs")
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    again = diffusers.ModularPipeline.from_pretrained(str(tmp_path))
    again.load_components("unet")
    assert str(skip_connections(again)) == str(skip_connections(pipe))
