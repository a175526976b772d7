"""
Fashion-MNIST, and the small ResNet whose features measure FID on it.

The networks that are usual for FID know photographs. This one learns the labels of Fashion-MNIST; its test accuracy
says how well it knows these images.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.stream import Stream
from scalelong_diffusers.data.training_data import load_training_data
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import atomic_write
from scalelong_diffusers.terminal import print_lines


SIZE = 28
# Entries of the configs of models for these images, and a small U-Net.
IMAGES = {"sample_size": SIZE, "in_channels": 1, "out_channels": 1}
SMALL_UNET = {
    "_class_name": "ScaleLongUNet2DModel",
    **IMAGES,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "attention_head_dim": 16,
    "down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
}
NUM_TEST_IMAGES = 10_000
BATCH_SIZE, EPOCHS, PEAK_RATE = 128, 12, 4e-3
_MEAN = _STD = 0.5  # as the pixels of the training data, -1 to 1


def data_source(data: str, folder: Path) -> dict[str, str]:
    """Return the data option of the training script. Debian's idx files are converted to parquet first."""
    if not Path(data).is_dir():
        if Path(data).is_absolute():
            raise UserError(
                f"folder {data} does not exist: run apt-get install dataset-fashion-mnist, or pass a folder with "
                "Fashion-MNIST or its Hub id as --data"
            )
        return {"dataset_name": data}
    if not list(Path(data).glob("*-images-idx3-ubyte.gz")):
        return {"train_data_dir": data}
    out = folder / "fashion-mnist"
    out.mkdir(exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        if not (out / f"{split}.parquet").exists():
            _convert(Path(data), stem, out / f"{split}.parquet")
    return {"train_data_dir": str(out)}


def _convert(data: Path, stem: str, file: Path):
    import datasets

    datasets.disable_progress_bars()
    with gzip.open(data / f"{stem}-images-idx3-ubyte.gz") as images:
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, SIZE, SIZE)
    with gzip.open(data / f"{stem}-labels-idx1-ubyte.gz") as labels:
        classes = np.frombuffer(labels.read(), np.uint8, offset=8)
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": classes.tolist()}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(10)})
    atomic_write(file, datasets.Dataset.from_dict(columns, features=features).to_parquet, durable=False)


def feature_network(folder: Path, source: dict[str, str], epochs: int = EPOCHS) -> float:
    """Train the network and save it with its image processor, unless the folder has it. Return its test accuracy."""
    record = folder / "accuracy.json"
    if not record.exists():
        print_lines(f"training the feature network {folder}")
        torch.set_num_threads(1)  # like the runs, which may train at the same time
        data = DataConfig(**source, resolution=SIZE, validation_size=NUM_TEST_IMAGES)
        loaded = load_training_data(data, channels=1, needs_labels=True, needs_captions=False, seed=0)
        model = _train(loaded.train, loaded.num_classes, epochs)
        model.save_pretrained(folder)
        processor = ViTImageProcessorPil(
            size={"height": SIZE, "width": SIZE}, image_mean=[_MEAN] * 3, image_std=[_STD] * 3
        )
        processor.save_pretrained(folder)
        # Last: its presence means that the folder is complete.
        record.write_text(json.dumps(_accuracy(model, loaded.validation)) + "\n")
    return json.loads(record.read_text())


def _train(images: Stream, num_classes: int, epochs: int) -> ResNetForImageClassification:
    torch.manual_seed(0)
    widths = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
    model = ResNetForImageClassification(ResNetConfig(**widths, layer_type="basic", num_labels=num_classes))
    steps = epochs * images.num_samples // BATCH_SIZE
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    for batch in images.batches(BATCH_SIZE, num_steps=steps):
        loss = F.cross_entropy(model(batch["pixel_values"].expand(-1, 3, -1, -1)).logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def _accuracy(model: ResNetForImageClassification, images: Stream) -> float:
    correct = [
        model(batch["pixel_values"].expand(-1, 3, -1, -1)).logits.argmax(1) == batch["labels"]
        for batch in images.batches(BATCH_SIZE)
    ]
    return round(torch.cat(correct).float().mean().item(), 4)
