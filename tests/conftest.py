"""Tiny models of every class that can be scaled, and an independent implementation of the paper to test them with."""

import importlib
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest


os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import torch
from diffusers.pipelines.deprecated.unidiffuser import modeling_uvit

import scalelong_diffusers
from scalelong_diffusers import LongSkip, SkipFactor, register_skip_method
from scalelong_diffusers.scaling import METHODS


torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """
    A model class of diffusers with a small config and the shapes of its inputs.

    `reads` names the layers that read a concatenation of hidden state and skip, as read from diffusers' source: name,
    dimension of the channels and width of the hidden state, from the outermost skip. Without it, `PaperReading` finds
    them in a U-Net.
    """

    name: str
    class_name: str
    config: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    integers: dict[str, tuple[int, ...]]
    reads: tuple[tuple[str, int, int], ...] = ()

    @property
    def plain_class(self) -> type:
        return getattr(diffusers, self.class_name, None) or getattr(modeling_uvit, self.class_name)

    def build(self, **overrides):
        torch.manual_seed(0)
        return self.plain_class(**{**self.config, **overrides}).eval()

    def build_scaled(self, skip_scaling):
        torch.manual_seed(0)
        return getattr(scalelong_diffusers, self.scaled_name)(**self.config, skip_scaling=skip_scaling).eval()

    @property
    def scaled_name(self) -> str:
        return f"ScaleLong{self.class_name}"

    def make_inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = {name: torch.randn(shape, generator=generator) for name, shape in self.inputs.items()}
        inputs |= {name: torch.randint(1, 5, shape, generator=generator) for name, shape in self.integers.items()}
        added = {key: inputs.pop(key) for key in ("text_embeds", "time_ids") if key in inputs}
        return inputs | ({"added_cond_kwargs": added} if added else {})


def _unet(down, up, channels=(16, 32), **config):
    return {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": channels,
        "down_block_types": down,
        "up_block_types": up,
        "norm_num_groups": 8,
        **config,
    }


_IMAGE = {"sample": (2, 3, 8, 8)}
_LATENT = {"sample": (2, 4, 8, 8), "encoder_hidden_states": (2, 5, 16)}
_TIME = {"timestep": (2,)}
_COND = {"cross_attention_dim": 16, "attention_head_dim": 4}
_VIDEO = {"cross_attention_dim": 16, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}

CASES = [
    Case(
        "ddpm",
        "UNet2DModel",
        _unet(("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D"), layers_per_block=2),
        _IMAGE,
        _TIME,
    ),
    Case(
        "class-conditional",
        "UNet2DModel",
        _unet(
            ("DownBlock2D", "AttnDownBlock2D"),
            ("AttnUpBlock2D", "UpBlock2D"),
            num_class_embeds=5,
            resnet_time_scale_shift="scale_shift",
        ),
        _IMAGE,
        _TIME | {"class_labels": (2,)},
    ),
    Case(
        "skip-blocks",
        "UNet2DModel",
        _unet(
            ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
            ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
            channels=(32, 32),
            time_embedding_type="fourier",
        ),
        _IMAGE,
        _TIME,
    ),
    Case(
        "resnet-up-blocks",
        "UNet2DModel",
        _unet(
            ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
            ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
            downsample_type="resnet",
            upsample_type="resnet",
        ),
        _IMAGE,
        _TIME,
    ),
    Case(
        "sd",
        "UNet2DConditionModel",
        _unet(
            ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=2, **_COND
        ),
        _LATENT,
        _TIME,
    ),
    Case(
        "sdxl",
        "UNet2DConditionModel",
        _unet(
            ("DownBlock2D", "CrossAttnDownBlock2D"),
            ("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64,
            **_COND,
        ),
        _LATENT | {"text_embeds": (2, 16), "time_ids": (2, 6)},
        _TIME,
    ),
    Case(
        "simple-cross-attention",
        "UNet2DConditionModel",
        _unet(
            ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            **_COND,
        ),
        _LATENT,
        _TIME,
    ),
    Case(
        "k-blocks",  # as in the latent upscaler: the first up-block and the last skips of the others are unused
        "UNet2DConditionModel",
        _unet(
            ("KDownBlock2D", *["KCrossAttnDownBlock2D"] * 3),
            (*["KCrossAttnUpBlock2D"] * 3, "KUpBlock2D"),
            channels=(32, 32, 64, 64),
            layers_per_block=2,
            mid_block_type=None,
            norm_num_groups=None,
            resnet_time_scale_shift="scale_shift",
            act_fn="gelu",
            time_embedding_type="fourier",
            timestep_post_act="gelu",
            conv_in_kernel=1,
            conv_out_kernel=1,
            cross_attention_dim=16,
            attention_head_dim=8,
        ),
        _LATENT | {"sample": (2, 4, 16, 16)},
        _TIME,
    ),
    Case(
        "3d",
        "UNet3DConditionModel",
        _unet(("CrossAttnDownBlock3D", "DownBlock3D"), ("UpBlock3D", "CrossAttnUpBlock3D"), **_VIDEO),
        {"sample": (1, 4, 3, 8, 8), "encoder_hidden_states": (1, 5, 16)},
        {"timestep": (1,)},
    ),
    Case(
        "i2vgen-xl",
        "I2VGenXLUNet",
        _unet(
            ("CrossAttnDownBlock3D", "DownBlock3D"),
            ("UpBlock3D", "CrossAttnUpBlock3D"),
            channels=(32, 64),
            cross_attention_dim=32,
            attention_head_dim=8,
        ),
        {
            "sample": (1, 4, 3, 8, 8),
            "image_latents": (1, 4, 3, 8, 8),
            "image_embeddings": (1, 32),
            "encoder_hidden_states": (1, 5, 32),
        },
        {"timestep": (1,), "fps": (1,)},
    ),
    Case(
        "motion",
        "UNetMotionModel",
        _unet(
            ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            cross_attention_dim=16,
            num_attention_heads=2,
            motion_num_attention_heads=2,
        ),
        {"sample": (1, 4, 3, 8, 8), "encoder_hidden_states": (3, 5, 16)},
        {"timestep": (1,)},
    ),
    Case(
        "spatio-temporal",
        "UNetSpatioTemporalConditionModel",
        {
            key: value
            for key, value in _unet(
                ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                channels=(32, 64),
                layers_per_block=2,
                in_channels=4,
                out_channels=4,
                cross_attention_dim=16,
                num_attention_heads=(2, 4),
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=24,
            ).items()
            if key != "norm_num_groups"
        },
        {"sample": (1, 3, 4, 8, 8), "encoder_hidden_states": (1, 1, 16), "added_time_ids": (1, 3)},
        {"timestep": (1,)},
    ),
    Case(
        "1d",
        "UNet1DModel",
        {"sample_size": 64, "block_out_channels": (32, 32, 64), "extra_in_channels": 16, "time_embedding_dim": 16},
        {"sample": (2, 2, 64)},
        _TIME,
        reads=(("up_blocks.2.resnets.0", 1, 32), ("up_blocks.1.resnets.0", 1, 32), ("up_blocks.0.resnets.0", 1, 64)),
    ),
    Case(
        "1d-temporal",  # as in value-guided planning
        "UNet1DModel",
        {
            "sample_size": 16,
            "in_channels": 6,
            "out_channels": 6,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "block_out_channels": (16, 32, 64),
            "down_block_types": ("DownResnetBlock1D",) * 3,
            "up_block_types": ("UpResnetBlock1D",) * 2,
            "mid_block_type": "MidResTemporalBlock1D",
            "out_block_type": "OutConv1DBlock",
            "act_fn": "mish",
        },
        {"sample": (2, 6, 16)},
        _TIME,
        reads=(("up_blocks.1.resnets.0", 1, 32), ("up_blocks.0.resnets.0", 1, 64)),
    ),
    Case(
        "kandinsky3",
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 4,
            "layers_per_block": 2,
            "block_out_channels": (16, 32, 48, 48),
            "cross_attention_dim": 16,
            "encoder_hid_dim": 16,
        },
        {**_LATENT, "sample": (2, 4, 16, 16), "encoder_attention_mask": (2, 5)},
        _TIME,
        reads=(("up_blocks.3", 1, 16), ("up_blocks.2", 1, 32), ("up_blocks.1", 1, 48)),
    ),
    Case(
        "stable-cascade",
        "StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 8,
            "conditioning_dim": 16,
            "block_out_channels": (16, 32, 32),
            "num_attention_heads": (2, 2, 2),
            "down_num_layers_per_block": (1, 1, 1),
            "up_num_layers_per_block": (1, 1, 2),
            "down_blocks_repeat_mappers": (1, 1, 1),
            "up_blocks_repeat_mappers": (1, 2, 1),  # the skip of the middle level is read twice
            "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 3,
            "clip_text_pooled_in_channels": 16,
            "clip_seq": 1,
            "dropout": (0.0, 0.0, 0.0),
            "switch_level": (False, True),
        },
        {"sample": (2, 4, 8, 8), "timestep_ratio": (2,), "clip_text_pooled": (2, 1, 16)},
        {},
        reads=(("up_blocks.2.0.channelwise", 3, 16), ("up_blocks.1.0.channelwise", 3, 32)),
    ),
    Case(
        "hunyuan-dit",
        "HunyuanDiT2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 32,
            "num_layers": 8,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 16,
            "text_len": 5,
            "text_len_t5": 6,
            "use_style_cond_and_image_meta_size": False,
        },
        {
            "hidden_states": (2, 4, 8, 8),
            "timestep": (2,),
            "encoder_hidden_states": (2, 5, 16),
            "encoder_hidden_states_t5": (2, 6, 16),
        },
        {"text_embedding_mask": (2, 5), "text_embedding_mask_t5": (2, 6)},
        # Eight layers: 0 to 2 leave a skip, 3 and 4 are the middle, 5 to 7 read one.
        reads=(("blocks.7.skip_norm", 2, 32), ("blocks.6.skip_norm", 2, 32), ("blocks.5.skip_norm", 2, 32)),
    ),
    Case(
        "unidiffuser",
        "UTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 8,
            "num_layers": 6,
            "sample_size": 8,
            "norm_type": "layer_norm",
        },
        {"hidden_states": (2, 8, 8, 8)},
        {},
        reads=tuple((f"transformer_out_blocks.{b}.skip.skip_linear", 2, 32) for b in (2, 1, 0)),
    ),
    Case(
        "dreamlite",
        "DreamLiteUNetModel",
        _unet(
            ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteDownBlock2D"),
            ("DreamLiteUpBlock2D", "DreamLiteCrossAttnUpBlock2D"),
            **_COND,
        ),
        _LATENT,
        _TIME,
    ),
    Case(
        "audioldm2",
        "AudioLDM2UNet2DConditionModel",
        _unet(
            ("CrossAttnDownBlock2D", "DownBlock2D"),
            ("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=(16, 16),
            attention_head_dim=4,
        ),
        _LATENT,
        _TIME,
    ),
    Case(
        "controlnet-xs",
        "UNetControlNetXSModel",
        {
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "ctrl_conditioning_embedding_out_channels": (8,),
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 4,
        },
        _LATENT | {"controlnet_cond": (2, 3, 8, 8)},
        _TIME,
        reads=(
            *[(f"up_blocks.1.resnets.{r}", 1, hidden) for r, hidden in ((2, 16), (1, 16), (0, 32))],
            *[(f"up_blocks.0.resnets.{r}", 1, 32) for r in (2, 1, 0)],
        ),
    ),
]
CASES_BY_NAME = {case.name: case for case in CASES}

# One model for each way to pass skips, with as few layers as possible, since compilers take long for each layer.
FEW_LAYERS = {
    "ddpm": _unet(("DownBlock2D",), ("UpBlock2D",), channels=(16,), mid_block_type=None),
    "sd": _unet(("DownBlock2D",), ("UpBlock2D",), channels=(16,), mid_block_type=None, **_COND),
    "stable-cascade": {
        "block_out_channels": (16, 32),
        "num_attention_heads": (2, 2),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "down_blocks_repeat_mappers": (1, 1),
        "up_blocks_repeat_mappers": (1, 1),
        "block_types_per_layer": (("SDCascadeResBlock",),) * 2,
        "dropout": (0.0, 0.0),
        "switch_level": (False,),
    },
    "hunyuan-dit": {"num_layers": 4},
    "unidiffuser": {"num_layers": 2},
}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request) -> Case:
    return request.param


@pytest.fixture
def cases() -> dict[str, Case]:
    return CASES_BY_NAME


@pytest.fixture
def few_layers() -> dict[str, Case]:
    return {
        name: replace(CASES_BY_NAME[name], config={**CASES_BY_NAME[name].config, **config})
        for name, config in FEW_LAYERS.items()
    }


@pytest.fixture
def ddpm() -> Case:
    return CASES_BY_NAME["ddpm"]


@pytest.fixture
def sd() -> Case:
    return CASES_BY_NAME["sd"]


class PaperReading:
    """
    Runs a stock model and multiplies its skips where a layer reads them together with the hidden state.

    In a U-Net these layers are the decoder's resnets, and the skips are the trailing channels of their input; the
    widths of the skips come from a run of the encoder. For other models, the case names the layers. The package is not
    used.
    """

    def __init__(self, model):
        self.model = model
        self.reads = next((case.reads for case in CASES if case.reads and _is_of(case, model)), ())

    def __call__(self, inputs, factor):
        """Return the output. `factor(i, n, skip)` is called for each skip; i = 1 is the outermost of n."""
        if self.reads:
            return self._run_with_reads(inputs, factor)
        consumed = []
        self._run(inputs, lambda order, skip: consumed.append(order) or 1.0)
        n = len(consumed)
        return self._run(inputs, lambda order, skip: factor(n - order, n, skip))

    def _run_with_reads(self, inputs, factor):
        def scale_skip(i, dim, width):
            def hook(module, args):
                both = args[0].movedim(dim, 1).clone()
                skip = both[:, width:].contiguous()
                both[:, width:] = skip * factor(i, len(self.reads), skip)
                return (both.movedim(1, dim), *args[1:])

            return hook

        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(scale_skip(i, dim, width))
            for i, (name, dim, width) in enumerate(self.reads, start=1)
        ]
        return self._output(inputs, handles)

    def _run(self, inputs, factor_of):
        widths, handles, orders = [], [], iter(range(1000))

        def note_conv_in(module, args, output):
            widths.append(output.shape[1])

        def note_down_block(module, args, output):
            widths.extend(None if skip is None else skip.shape[1] for skip in output[1])

        def scale_trailing(width):
            def hook(module, args, kwargs):
                hidden = (args[0] if args else kwargs["input_tensor"]).clone()
                skip = hidden[:, hidden.shape[1] - width :].contiguous()
                hidden[:, hidden.shape[1] - width :] = skip * factor_of(next(orders), skip)
                return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"input_tensor": hidden})

            return hook

        def hook_resnets(block, args, kwargs):
            handed = [widths.pop() for _ in block.resnets]
            takes_one = type(block).__name__.startswith("K")
            for resnet, width in zip(block.resnets, handed[:1] if takes_one else handed):
                if width is not None:
                    handles.append(resnet.register_forward_pre_hook(scale_trailing(width), with_kwargs=True))

        handles.append(self.model.conv_in.register_forward_hook(note_conv_in))
        handles.extend(block.register_forward_hook(note_down_block) for block in self.model.down_blocks)
        handles.extend(
            block.register_forward_pre_hook(hook_resnets, with_kwargs=True) for block in self.model.up_blocks
        )
        return self._output(inputs, handles)

    def _output(self, inputs, handles):
        try:
            with torch.no_grad():
                return self.model(**inputs).sample
        finally:
            for handle in handles:
                handle.remove()


def _is_of(case: Case, model) -> bool:
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in model.config.items()}
    same_class = type(model).__name__ == case.class_name
    return same_class and all(config[name] == value for name, value in case.config.items())


@pytest.fixture
def paper_reading():
    return PaperReading


@pytest.fixture
def scalelong(capsys):
    """Run a command in this process and return its exit code, stdout and stderr."""
    from scalelong_diffusers.cli import main

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def benchmark(project_root, monkeypatch):
    """Return a function that imports a module of the folder benchmarks/."""
    folder = project_root / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def full_disk():
    """`with full_disk(size)`: writing beyond `size` bytes of a file fails, as on a full disk."""

    @contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def in_fresh_process(tmp_path):
    """Return a function that runs Python code in a new process outside the checkout, and returns its output."""

    def run(code: str, *args: str, check: bool = True, **env: str) -> subprocess.CompletedProcess:
        script = tmp_path / "fresh_process.py"
        script.write_text(code)
        return subprocess.run(
            [sys.executable, str(script), *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONWARNINGS": "ignore", **env},
            capture_output=True,
            text=True,
            check=check,
            timeout=120,
        )

    return run


@pytest.fixture
def tiny_clip():
    """Return a text encoder of width 16 for 12 tokens, and its tokenizer, which knows letters, "red" and "circle"."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(c) + end for c in range(ord("a"), ord("z") + 1) for end in ("", "</w>")]
    # Byte pairs join the letters of a word from its start.
    merges = [("r", "e"), ("re", "d</w>"), *(("circle"[:n], "circle"[n]) for n in range(1, 5)), ("circl", "e</w>")]
    tokens = [*letters, *map("".join, merges), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    config = CLIPTextConfig(
        vocab_size=len(vocab), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=12, bos_token_id=vocab["<|startoftext|>"], eos_token_id=vocab["<|endoftext|>"],
    )  # fmt: skip
    return CLIPTextModel(config).eval(), CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=12)


@pytest.fixture
def tiny_vae():
    """Return an autoencoder with 4 latent channels at half the size."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    config = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4, "sample_size": 16}
    return diffusers.AutoencoderKL(**config, **blocks).eval()


@pytest.fixture
def tiny_stable_diffusion(sd, tiny_clip, tiny_vae):
    """Return a tiny Stable Diffusion with U-Net, VAE, CLIP, tokenizer and scheduler."""
    text_encoder, tokenizer = tiny_clip
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    return diffusers.StableDiffusionPipeline(
        vae=tiny_vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=sd.build(), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


_CAPTIONS = ["a red circle", "a blue square on a table", "a green triangle"]
_NO_SAFETY_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_SD_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _small_clip(seed, width):
    from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer

    torch.manual_seed(seed)
    tokenizer = build_tokenizer(_CAPTIONS, context_length=10)
    return build_text_model(tokenizer, width, num_layers=3, num_attention_heads=2), tokenizer


def _clip_with_projection(seed, width):
    """Return a text encoder like the second one of SDXL."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    plain, tokenizer = _small_clip(seed, width)
    config = CLIPTextConfig(**{**plain.config.to_dict(), "projection_dim": 16})
    return CLIPTextModelWithProjection(config).eval(), tokenizer


def _stable_diffusion(unet, vae, scheduler):
    text_encoder, tokenizer = _small_clip(1, 16)
    return diffusers.StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, **_NO_SAFETY_CHECKER)


def _build_sd1(cases, vae):
    scheduler = diffusers.PNDMScheduler(**_SD_SCHEDULE, skip_prk_steps=True)
    return _stable_diffusion(cases["sd"].build(), vae, scheduler)


def _build_sd2(cases, vae):
    scheduler = diffusers.DDIMScheduler(
        **_SD_SCHEDULE, prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False
    )
    return _stable_diffusion(cases["sd"].build(use_linear_projection=True), vae, scheduler)


def _build_sdxl(cases, vae):
    unet = cases["sdxl"].build(cross_attention_dim=24)
    (one, tokenizer), (two, tokenizer_2) = _small_clip(1, 16), _clip_with_projection(2, 8)
    scheduler = diffusers.EulerDiscreteScheduler(**_SD_SCHEDULE)
    return diffusers.StableDiffusionXLPipeline(
        vae, one, two, tokenizer, tokenizer_2, unet, scheduler, add_watermarker=False
    )


_KINDS = {"sd1": _build_sd1, "sd2": _build_sd2, "sdxl": _build_sdxl}


@pytest.fixture
def build_kind(cases, tiny_vae):
    """Return a function that builds a pipeline by kind, such as `"sdxl"`, with the same random weights each time."""

    def build(kind):
        pipe = _KINDS[kind](cases, tiny_vae)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return build


@pytest.fixture
def hub(in_fresh_process, tmp_path):
    """
    Start the Hub of tests/helpers/loopback_hub.py and return a function that runs code in a new process with it.

    Call `hub(code, *args, token=hub.owner_token, home="home")`. Processes with the same home share downloads.
    """
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "helpers" / "loopback_hub.py")], stdout=subprocess.PIPE, text=True
    )
    url = server.stdout.readline().strip()

    def run(code, *args, token=None, home="home", **options):
        env = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / home), "HF_TOKEN": token or run.owner_token}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env["OMP_NUM_THREADS"] = "1"  # more threads slow tiny models down
        return in_fresh_process(code, *args, **{**env, **options})

    run.owner_token = "hf_ownerOwnerOwnerOwnerOwnerOwner"
    run.reader_token = "hf_readerReaderReaderReaderReader"
    yield run
    server.terminate()
    server.wait()
    server.stdout.close()


def _make_network(folder: Path, **config) -> Path:
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(image_size=8, patch_size=4, initializer_range=0.5, **{**sizes, **config})
    ViTModel(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


@pytest.fixture
def make_network():
    """Return a function that saves a feature network, a ViT with its image processor, to a folder."""
    return _make_network


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Path:
    """Return the folder of a feature network with 16 features."""
    return _make_network(tmp_path_factory.mktemp("networks") / "tiny-vit")


@pytest.fixture
def project_root() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture(params=["sd1", "sd2", "sdxl"])
def kind(request):
    return request.param


@pytest.fixture
def draw():
    """Return a function that samples an image from the same noise each time."""

    def run(pipe, prompt="a red circle"):
        generator = torch.Generator().manual_seed(0)
        return pipe(prompt, num_inference_steps=2, generator=generator, output_type="pt").images

    return run


@pytest.fixture
def predict():
    """Return a function that runs the U-Net of a pipeline on the same latents each time."""

    def run(pipe, arguments):
        generator = torch.Generator().manual_seed(0)
        count = len(arguments["encoder_hidden_states"])
        latents = torch.randn(count, 4, 8, 8, generator=generator)
        with torch.no_grad():
            return pipe.unet(latents, torch.arange(count) * 300, **arguments).sample

    return run


@pytest.fixture
def fresh_compiler():
    """Forget compiled code: torch limits how often it compiles the same function."""
    torch._dynamo.reset()


@pytest.fixture
def channel_factors():
    """Register a method as a user would, and return its class. All methods of a test are forgotten afterwards."""
    known = dict(METHODS)

    @register_skip_method("channel_factors")
    class ChannelFactors(SkipFactor):
        """
        One learned factor per channel.

        It starts at `start`.
        """

        def __init__(self, skip: LongSkip, start: float = 1.0):
            super().__init__(skip)
            self.start = start
            self.values = torch.nn.Parameter(torch.empty(skip.width))
            self.register_buffer("three", torch.full((2,), 3.0), persistent=False)

        def reset_parameters(self):
            self.values.fill_(self.start)

        def initial_weights(self):
            return 1.0, self.start

        def forward(self, skip):
            return self.per_channel(self.values, skip)

    yield ChannelFactors
    METHODS.clear()
    METHODS.update(known)


LOCK_HOLDER = """
import os, sys, time
from pathlib import Path
from scalelong_diffusers.locks import FolderLock

lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
worker = os.fork() if "--worker" in sys.argv else None
if worker == 0:
    time.sleep(60)
print(worker, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock_holder():
    """`with lock_holder(folder)`: another process holds the lock of the folder until its input is closed."""

    @contextmanager
    def hold(folder, *flags):
        command = [sys.executable, "-c", LOCK_HOLDER, str(folder), *flags]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            process.first_line = process.stdout.readline().strip()
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    return hold


@pytest.fixture(scope="session")
def browser():
    """Start the system's chromium."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a file or an address, and records the requests and errors of the page."""
    contexts = []

    def run(file, width=1200, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.requested, page.errors = [], []
        page.on("request", lambda request: page.requested.append(request.url))
        page.on("console", lambda message: page.errors.append(message.text))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(file if isinstance(file, str) else file.as_uri())
        return page

    yield run
    for context in contexts:
        context.close()
