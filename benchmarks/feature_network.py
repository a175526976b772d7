"""
Train the small ResNet whose features measure FID in the convergence benchmark, on the labels of Fashion-MNIST.

The networks that are usual for FID know photographs. This one knows these images; its test accuracy says how well.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.stream import Stream
from scalelong_diffusers.data.training_data import load_training_data


BATCH_SIZE, EPOCHS, PEAK_RATE = 128, 12, 4e-3
_MEAN = _STD = 0.5  # as the pixels of the training data, -1 to 1


def feature_network(folder: Path, data: DataConfig) -> float:
    """Train the network and save it with its image processor, unless the folder has it. Return its test accuracy."""
    record = folder / "accuracy.json"
    if not record.exists():
        print(f"training the feature network {folder}", flush=True)
        loaded = load_training_data(data, channels=1, needs_labels=True, needs_captions=False, seed=0)
        model = _train(loaded.train, loaded.num_classes)
        model.save_pretrained(folder)
        size = {"height": data.resolution, "width": data.resolution}
        processor = ViTImageProcessorPil(size=size, image_mean=[_MEAN] * 3, image_std=[_STD] * 3)
        processor.save_pretrained(folder)
        # Last: its presence means that the folder is complete.
        record.write_text(json.dumps(_accuracy(model, loaded.validation)) + "\n")
    return json.loads(record.read_text())


def _train(images: Stream, num_classes: int) -> ResNetForImageClassification:
    torch.manual_seed(0)
    widths = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
    model = ResNetForImageClassification(ResNetConfig(**widths, layer_type="basic", num_labels=num_classes))
    steps = EPOCHS * images.num_samples // BATCH_SIZE
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
