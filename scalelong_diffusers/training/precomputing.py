"""Write a folder of precomputed latents, with several processes, and resume it after an interruption."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from scalelong_diffusers.data import Batch, DataConfig, TrainingData, UnreadableImage
from scalelong_diffusers.data.batch import Draws
from scalelong_diffusers.data.images import Transform
from scalelong_diffusers.data.precomputed import (
    INDEX_FILE,
    is_complete_shard,
    read_index,
    save_empty_caption,
    save_shard,
    shard_path,
    transform_settings,
    write_index,
)
from scalelong_diffusers.data.stream import ImageRows, Source, Stream
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, remove_leftovers
from scalelong_diffusers.locks import LOCK_FILE, locked
from scalelong_diffusers.options import option
from scalelong_diffusers.pipelines.text_encoding import hidden_states, max_tokens, tokenize
from scalelong_diffusers.processes import processes, run_on_all_processes, run_on_main_process
from scalelong_diffusers.training.latents import encode_moments, text_encoder_checksum, weights_checksum
from scalelong_diffusers.training.models import load_vae
from scalelong_diffusers.training.text import load_text_encoder_for_training


DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecomputeDataConfig(DataConfig):
    """The data of a precomputation. Some options mean something else than in training."""

    caption_column: str | None = option(None, "caption column, if not detected; all captions of an image are encoded")
    center_crop: bool = option(False, "required: latents are computed from one crop, at the center of each image")
    random_flip: bool = option(False, "also encode the mirrored images, for --random_flip in training")
    on_bad_image: str = option(
        "error",
        "what to do with an unreadable image: stop, or record it for training to skip",
        choices=("error", "skip"),
    )


class Encoders:
    """
    The frozen encoders whose outputs are stored.

    Args:
        vae: folder or id of the autoencoder.
        text_encoder: folder or id of the text encoder, or None if captions are not encoded.
        dtype: dtype of the stored outputs, a key of `DTYPES`.
    """

    def __init__(self, vae: str, text_encoder: str | None = None, dtype: str = "fp32"):
        device = processes().device
        self.vae_name, self.text_encoder_name, self.dtype = vae, text_encoder, dtype
        self.vae = load_vae(vae, device)
        self.text = None if text_encoder is None else load_text_encoder_for_training(text_encoder, device)

    def moments(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return means and log variances of the latents."""
        return encode_moments(pixels.to(self.vae.device), self.vae).to("cpu", DTYPES[self.dtype])

    @torch.no_grad()
    def text_states(self, captions: list[str]) -> torch.Tensor:
        """Return the hidden states of captions."""
        text_encoder, tokenizer = self.text
        ids = tokenize(captions, tokenizer, max_tokens(text_encoder, tokenizer))
        return hidden_states(ids.to(text_encoder.device), text_encoder).to("cpu", DTYPES[self.dtype])

    def description(self) -> dict[str, Any]:
        """Return names and checksums for the index."""
        text_encoder = None
        if self.text is not None:
            text_encoder = {
                "name": self.text_encoder_name,
                "checksum": text_encoder_checksum(*self.text),
                "max_tokens": max_tokens(*self.text),
            }
        autoencoder = {"name": self.vae_name, "checksum": weights_checksum(self.vae)}
        return {"autoencoder": autoencoder, "text_encoder": text_encoder, "dtype": self.dtype}


@dataclass(frozen=True)
class _RowsToEncode:
    """Rows with an image, a label and all captions. With `skip_bad`, an unreadable image becomes a black one."""

    source: Source
    transform: Transform
    needs_labels: bool
    needs_captions: bool
    skip_bad: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        rows = ImageRows(self.source, self.transform, self.needs_labels, self.needs_captions)
        columns = {"unreadable": None}
        try:
            columns |= rows.read(index, draws)
            columns.pop("captions", None)  # one of them
        except UnreadableImage as error:
            if not self.skip_bad:
                raise
            size, channels = self.transform.resolution, self.transform.channels
            columns |= {"pixel_values": np.zeros((size, size, channels), np.uint8), "unreadable": str(error)}
            columns |= {"labels": self.source.label(index)} if self.needs_labels else {}
        # A row without captions is unreadable, and its empty text is not used.
        return columns | ({"all_captions": self.source.captions(index) or [""]} if self.needs_captions else {})

    def name(self, index: int) -> str:
        return self.source.name(index)


class PrecomputedWriter:
    """
    Writer that encodes a dataset and saves the shards, with all processes together.

    Complete shards of an interrupted run are kept. The index marks the folder as finished at the end.
    """

    def __init__(self, folder: str, config: DataConfig, data: TrainingData, encoders: Encoders, rows_per_shard: int):
        self.folder = Path(folder)
        self.config = config
        self.encoders = encoders
        rows = data.train.rows
        columns = {
            "moments": True,
            "mirrored_moments": config.random_flip,
            "labels": rows.needs_labels,
            "text_states": rows.needs_captions,
        }
        # Resuming requires the same values, and training checks them.
        self.made_of = encoders.description() | {
            "transform": transform_settings(config, data.channels),
            "data": data.fingerprint,
            "columns": [name for name, is_stored in columns.items() if is_stored],
            "rows_per_shard": rows_per_shard,
        }
        self.images = {
            "description": data.description,
            "channels": data.channels,
            "num_classes": data.num_classes,
            "class_names": data.class_names,
            "first_image_size": list(data.first_image_size),
        }
        sources = {"train": rows.source, "validation": data.validation.rows.source}
        plain = dataclasses.replace(rows.transform, random_flip=False)
        skip_bad = config.on_bad_image == "skip"
        self._rows = {
            name: _RowsToEncode(source, plain, rows.needs_labels, rows.needs_captions, skip_bad)
            for name, source in sources.items()
            if name == "train" or source is not rows.source
        }

    def write(self, batch_size: int) -> int:
        """Write all shards that are missing or damaged. Returns the size of all shards in bytes."""
        with locked(self.folder):
            run_on_main_process(self._prepare_folder)
            if self.encoders.text is not None:
                run_on_main_process(
                    lambda: save_empty_caption(self.folder, self.encoders.text_states([""])[0].contiguous())
                )
            state = processes()
            own = self._shards(state.process_index, state.num_processes)
            # All processes take the same number of turns, so that a failure in one stops the others after their turn.
            turns = [shard for _, shard in zip_longest(self._shards(0, state.num_processes), own)]
            with tqdm(turns, desc="shards", disable=not state.is_local_main_process) as bar:  # ends its line on errors
                for shard in bar:
                    run_on_all_processes(partial(self._write_shard, shard, batch_size))
            return run_on_main_process(self._finish)

    def _prepare_folder(self):
        index = read_index(self.folder)
        changed = [] if index is None else _differences(index["made_of"], self.made_of)
        if index is None and any(not path.name.startswith((LOCK_FILE, PARTIAL)) for path in self.folder.iterdir()):
            changed = ["it has no " + INDEX_FILE]
        if changed:
            reason = f"holds other files or precomputed latents: {'; '.join(changed)}"
            raise UserError(f"output_dir {self.folder} {reason}; use the same settings, or another folder")
        remove_leftovers(self.folder)
        self._write_index(finished=False)

    def _shards(self, rank: int, num_processes: int) -> Iterator[tuple[Path, _RowsToEncode, np.ndarray]]:
        """Yield the file, the reader and the row numbers of each shard of one process."""
        per_shard = self.made_of["rows_per_shard"]
        for name, rows in self._rows.items():
            starts = range(0, len(rows.source), per_shard)
            for number, start in list(enumerate(starts))[rank::num_processes]:
                indices = np.arange(start, min(start + per_shard, len(rows.source)))
                yield shard_path(self.folder, name, number), rows, indices

    def _write_shard(self, shard: tuple[Path, _RowsToEncode, np.ndarray] | None, batch_size: int):
        if shard is None or is_complete_shard(shard[0]):
            return
        file, rows, indices = shard
        stream = Stream("precompute", rows, indices, seed=0, endless=False, skip_bad=False)
        batches = list(map(self._encode, stream.batches(batch_size, num_workers=self.config.dataloader_num_workers)))
        joined = {name: [entry for batch in batches for entry in batch[name]] for name in batches[0]}
        unreadable = {row: reason for row, reason in enumerate(joined.pop("unreadable")) if reason is not None}
        captions = joined.pop("all_captions", [])
        columns = {name: torch.stack(entries).contiguous() for name, entries in joined.items()}
        save_shard(file, columns, captions, unreadable)

    def _encode(self, batch: Batch) -> dict[str, torch.Tensor | list]:
        columns = {k: column for k, column in batch.columns.items() if k != "pixel_values"}
        columns["moments"] = self.encoders.moments(batch["pixel_values"])
        if self.config.random_flip:
            columns["mirrored_moments"] = self.encoders.moments(batch["pixel_values"].flip(-1))
        if self.encoders.text is not None:
            captions = [caption for row in batch["all_captions"] for caption in row]
            columns["text_states"] = self.encoders.text_states(captions)
        return columns

    def _finish(self) -> int:
        self._write_index(finished=True)
        return sum(file.stat().st_size for file, _, _ in self._shards(0, 1))

    def _write_index(self, finished: bool):
        splits = {name: {"rows": len(rows.source)} for name, rows in self._rows.items()}
        if finished:
            for name in splits:
                files = (file for file, rows, _ in self._shards(0, 1) if rows is self._rows[name])
                splits[name]["bytes"] = [file.stat().st_size for file in files]
        index = {"finished": finished, "made_of": self.made_of, "images": self.images, "splits": splits}
        write_index(self.folder, index)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    def without_name(value: Any) -> Any:
        # Encoders are compared by their weights, and may be loaded from elsewhere.
        return {key: v for key, v in value.items() if key != "name"} if isinstance(value, dict) else value

    changed = [name for name in now if without_name(before.get(name)) != without_name(now[name])]
    return [f"{name} was {before.get(name)!r} and is now {now[name]!r}" for name in changed]
