"""
The original layout of Stable Diffusion 1 and XL: all weights in one file, under other names.

diffusers only reads this layout. The names here are the inverse of those in its converters.
"""

import re

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModelWithProjection


_UNET = {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
_UNET |= {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"}
_UNET |= {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
_RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3"}
_RESNET |= {"time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
_VAE = {"conv_norm_out": "norm_out", "mid_block.attentions.0": "mid.attn_1", "conv_shortcut": "nin_shortcut"}
_VAE |= {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_VAE |= {"downsamplers.0": "downsample", "upsamplers.0": "upsample"}


_OPEN_CLIP = {
    "text_model.encoder.layers": "transformer.resblocks",
    "self_attn": "attn",
    "final_layer_norm": "ln_final",
}
_OPEN_CLIP |= {"text_model.embeddings.position_embedding.weight": "positional_embedding", "layer_norm1": "ln_1"}
_OPEN_CLIP |= {"text_model.embeddings.token_embedding": "token_embedding", "layer_norm2": "ln_2", "text_model.": ""}
_OPEN_CLIP |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}


def original_weights(pipe: StableDiffusionPipeline | StableDiffusionXLPipeline) -> dict[str, torch.Tensor]:
    """Return the weights of a Stable Diffusion 1 or XL in the original layout."""
    stages = len(pipe.vae.config.up_block_types)
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    clip = "conditioner.embedders.0" if is_xl else "cond_stage_model"
    parts = {
        "model.diffusion_model.": (pipe.unet, lambda name: _unet_name(name, pipe.unet)),
        "first_stage_model.": (pipe.vae, lambda name: _vae_name(name, stages)),
        f"{clip}.transformer.text_model.": (pipe.text_encoder, lambda name: name),
    }
    weights = {
        prefix + rename(name): weight.contiguous()
        for prefix, (model, rename) in parts.items()
        for name, weight in model.state_dict().items()
    }
    return weights | (_open_clip_weights(pipe.text_encoder_2) if is_xl else {})


def _open_clip_weights(encoder: CLIPTextModelWithProjection) -> dict[str, torch.Tensor]:
    """Return the weights of SDXL's second text encoder. OpenCLIP joins the projections of each attention."""
    weights = {_replace(name, _OPEN_CLIP): weight for name, weight in encoder.state_dict().items()}
    weights["text_projection"] = weights.pop("text_projection.weight").T.contiguous()
    for name in [name for name in weights if ".q_proj." in name]:
        joined = [weights.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        weights[name.replace("q_proj.", "in_proj_")] = torch.cat(joined)
    return {f"conditioner.embedders.1.model.{name}": weight for name, weight in weights.items()}


def _unet_name(name: str, unet: UNet2DConditionModel) -> str:
    layers = unet.config.layers_per_block + 1
    if match := re.match(r"(down|up|mid)_block(?:s\.(\d+))?\.(resnets|attentions|\w+samplers)\.(\d+)\.(.*)", name):
        part, block, kind, layer, rest = match.groups()
        block, layer = int(block or 0), int(layer)
        rest = _replace(rest, _RESNET) if kind == "resnets" else rest
        if part == "mid":
            return f"middle_block.{2 * layer if kind == 'resnets' else 1}.{rest}"
        if kind == "downsamplers":
            return f"input_blocks.{(block + 1) * layers}.0.{rest.replace('conv', 'op')}"
        if kind == "upsamplers":
            has_attention = hasattr(unet.up_blocks[block], "attentions")
            return f"output_blocks.{(block + 1) * layers - 1}.{2 if has_attention else 1}.{rest}"
        where = (
            f"input_blocks.{1 + block * layers + layer}"
            if part == "down"
            else f"output_blocks.{block * layers + layer}"
        )
        return f"{where}.{0 if kind == 'resnets' else 1}.{rest}"
    return _replace(name, _UNET)


def _vae_name(name: str, stages: int) -> str:
    name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{stages - 1 - int(m[1])}.block", name)
    name = re.sub(r"down_blocks\.(\d+)\.", r"down.\1.", name)
    name = re.sub(r"up_blocks\.(\d+)\.", lambda m: f"up.{stages - 1 - int(m[1])}.", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    return _replace(name, _VAE)


def _replace(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = re.sub(rf"(?<!\w){re.escape(old)}\b" if old[-1] != "." else re.escape(old), new, name)
    return name
