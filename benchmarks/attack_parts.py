"""What the attack works on: tiny models and datasets of every kind."""

import io
import json
import tarfile
from pathlib import Path

import datasets
import diffusers
import torch
import transformers

from scalelong_diffusers import UViTModel
from scalelong_diffusers.data import SHAPE_CLASSES
from scalelong_diffusers.data.shapes import Shapes
from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer


UVIT = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
_UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (16, 16),
    "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_VAE = {
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def make_models(folder: Path):
    """Write untrained models, a Stable Diffusion, a feature network, and a checkpoint of the reference."""
    torch.manual_seed(0)
    UViTModel(**UVIT).save_config(folder / "model")
    UViTModel(**UVIT, num_class_embeds=len(SHAPE_CLASSES) + 1).save_config(folder / "model_of_classes")
    UViTModel(**UVIT, cross_attention_dim=16, context_length=20).save_config(folder / "model_of_text")
    UViTModel(**UVIT, skip_scaling="ls").save_pretrained(folder / "sharded", max_shard_size="20KB")
    vae = diffusers.AutoencoderKL(**_VAE, sample_size=16)
    vae.save_pretrained(folder / "vae")
    tokenizer = build_tokenizer(["a red circle"], context_length=12, vocab_size=520)
    text_encoder = build_text_model(tokenizer, 16, num_layers=1, num_attention_heads=2)
    for part in (text_encoder, tokenizer):
        part.save_pretrained(folder / "clip")
    unet = diffusers.UNet2DConditionModel(**_UNET)
    nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    pipe = diffusers.StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, **nothing)
    pipe.save_pretrained(folder / "stable_diffusion")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=4, initializer_range=0.5, **sizes)
    transformers.ViTModel(config).save_pretrained(folder / "network")
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "network")
    (folder / "reference_checkpoint").mkdir()
    weights = {"pos_embed": torch.randn(1, 17, 16), "patch_embed.proj.weight": torch.randn(16, 3, 2, 2)}
    torch.save(weights, folder / "reference_checkpoint" / "nnet_ema.pth")


def make_datasets(folder: Path):
    """Write the same images as files of all formats, as files with captions, and as rows of tables and tar files."""
    shapes = Shapes(count=12, size=12)
    images = [shapes.image(k) for k in range(len(shapes))]
    labels = [shapes.label(k) % 2 for k in range(len(shapes))]
    for name in ("images", "captioned", "parquet", "tar"):
        (folder / name).mkdir()
    for k, (image, suffix) in enumerate(zip(images, 2 * ("png", "jpg", "webp", "gif", "bmp", "tiff"))):
        (folder / "images" / f"class {labels[k]}").mkdir(exist_ok=True)
        image.save(folder / "images" / f"class {labels[k]}" / f"{k}.{suffix}")
        image.save(folder / "captioned" / f"{k}.png")
    lines = [json.dumps({"file_name": f"{k}.png", "text": f"number {k}"}) + "\n" for k in range(len(images))]
    (folder / "captioned" / "metadata.jsonl").write_text("".join(lines))
    columns = {"image": images, "label": labels, "text": [f"number {k}" for k in range(len(images))]}
    label = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features(image=datasets.Image(), label=label, text=datasets.Value("string"))
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(folder / "parquet" / "train-0.parquet", batch_size=4)
    table.save_to_disk(folder / "saved")
    with tarfile.open(folder / "tar" / "a.tar", "w") as tar:
        for k, label in enumerate(labels):
            tar.add(folder / "captioned" / f"{k}.png", f"{k}.png")
            for suffix, text in (("cls", str(label)), ("txt", f"number {k}")):
                member = tarfile.TarInfo(f"{k}.{suffix}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
