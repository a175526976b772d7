"""Datasets from strangers: they start no program, read no other files, and neither hang nor fill the memory."""

import io
import json
import os
import re
import struct
import tarfile
import zlib

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scalelong_diffusers.data import UnreadableImage
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.images import ImageFiles
from scalelong_diffusers.image_files import read_image


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
NOT_ACCEPTED = r"not a PNG, JPEG, WebP, GIF, BMP or TIFF image \(it starts with b'%!PS-Adobe-3\.0 E'\)"


def huge_png(width, height):
    """Return a valid PNG of black pixels, which is much smaller than its pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """Put a program named gs on the PATH and return the file that it creates."""
    started = tmp_path / "started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow remembers whether there is one
    return started


@pytest.fixture
def rows(tmp_path):
    """Write images and other columns to a parquet file and return its folder."""

    def write(images, folder="rows", **others):
        (tmp_path / folder).mkdir(exist_ok=True)
        image = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        pq.write_table(pa.table({"image": image, **others}), tmp_path / folder / "a.parquet")
        return tmp_path / folder

    return write


class TestFormats:
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
    def test_reads_the_first_frame(self, kind):
        frames = [Image.new("RGB", (8, 8), color) for color in ("black", "white")]
        content = io.BytesIO()
        frames[0].save(content, kind, **({"save_all": True, "append_images": frames[1:]} if kind == "GIF" else {}))
        assert read_image(content.getvalue(), "it").convert("RGB").getpixel((0, 0)) == (0, 0, 0)

    @pytest.mark.parametrize("kind", ["PPM", "TGA", "ICO", "JPEG2000", "PCX", "EPS"])
    def test_rejects_other_formats(self, kind):
        content = io.BytesIO()
        Image.new("RGB", (16, 16)).save(content, kind)
        with pytest.raises(UnreadableImage, match=r"^it cannot be read: not a PNG, JPEG"):
            read_image(content.getvalue(), "it")

    def test_no_source_starts_ghostscript(self, load, image_folder, rows, tmp_path, ghostscript):
        folder = image_folder(["0.png", "1.png"])
        for file in folder.iterdir():
            file.write_bytes(EPS)
        with pytest.raises(UnreadableImage, match=rf"[01]\.png cannot be read: {NOT_ACCEPTED}; --on_bad_image"):
            load(train_data_dir=folder)
        with pytest.raises(UnreadableImage, match=rf"[01]\.png cannot be read: {NOT_ACCEPTED}$"):
            ImageFiles.of_folder(folder, None)
        table = rows([{"bytes": EPS, "path": "0.png"}] * 4)
        for streaming in (False, True):
            with pytest.raises(UnreadableImage, match=rf"row \d of .* cannot be read: {NOT_ACCEPTED}; --on_bad_image"):
                load(train_data_dir=table, streaming=streaming)
        tar_folder = write_tar(tmp_path / "tar", {"0.png": EPS, "1.png": EPS})
        with pytest.raises(UnreadableImage, match=rf"a\.tar cannot be read: {NOT_ACCEPTED}; --on_bad_image"):
            load(train_data_dir=tar_folder, streaming=True)
        assert not ghostscript.exists()

    def test_folders_ignore_other_files(self, load, image_folder, ghostscript):
        folder = image_folder(["0.png", "1.png"])
        (folder / "2.eps").write_bytes(EPS)
        assert load(train_data_dir=folder).description == "the folder pictures, 2 images (ignored: 1 .eps file)"
        assert not ghostscript.exists()


class TestPaths:
    @pytest.fixture
    def secret(self, tmp_path):
        file = tmp_path / "secret.png"
        Image.new("RGB", (8, 8), (1, 2, 3)).save(file)
        return file

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("form", ["absolute", "relative", "link"])
    def test_rows_cannot_name_files_outside(self, load, rows, secret, streaming, form):
        path = {"absolute": str(secret), "relative": "../secret.png", "link": "link.png"}[form]
        folder = rows([{"bytes": None, "path": path}] * 4)
        (folder / "link.png").symlink_to(secret)
        message = f"{path} cannot be read: it is outside of the dataset's folder {folder}"
        with pytest.raises(UnreadableImage, match=re.escape(message)):
            load(train_data_dir=folder, streaming=streaming)

    def test_rows_can_name_files_inside(self, load, rows, image_folder, tmp_path, numbers):
        image_folder(["0.png", "1.png"], folder="rows/images")
        inside = [{"bytes": None, "path": "images/0.png"}, {"bytes": None, "path": f"{tmp_path}/rows/images/1.png"}]
        data = load(train_data_dir=rows(inside))
        [train], [validation] = data.train.batches(1, num_steps=1), data.validation.batches(1)
        assert sorted(numbers(train) + numbers(validation)) == [0, 1]

    def test_metadata_cannot_name_links_to_files_outside(self, load, image_folder, secret):
        folder = image_folder(["0.png", "1.png"])
        (folder / "2.png").symlink_to(secret)
        lines = [json.dumps({"file_name": f"{k}.png", "text": "a"}) for k in range(3)]
        (folder / "metadata.jsonl").write_text("\n".join(lines))
        with pytest.raises(UnreadableImage, match=r"2\.png cannot be read: it is outside of the dataset's folder"):
            load(train_data_dir=folder)

    def test_links_into_the_blobs_of_a_downloaded_repository_are_inside(self, load, image_folder, tmp_path):
        image_folder(["0.png", "1.png"], folder="repo/blobs")
        folder = tmp_path / "repo" / "snapshots" / "main" / "data"
        folder.mkdir(parents=True)
        for k in range(2):
            (folder / f"{k}.png").symlink_to(f"../../../blobs/{k}.png")
        assert load(train_data_dir=folder).description == "the folder data, 2 images"
        assert load(train_data_dir=folder.parent).description == "the folder main, 2 images"

    @pytest.mark.parametrize("kind", ["fifo", "folder"])
    def test_rows_must_name_regular_files(self, load, rows, kind):
        folder = rows([{"bytes": None, "path": "0.png"}] * 4)
        (os.mkfifo if kind == "fifo" else os.mkdir)(folder / "0.png")
        with pytest.raises(UnreadableImage, match=r"0\.png cannot be read: it is not a regular file; --on_bad_image"):
            load(train_data_dir=folder)

    def test_names_that_the_system_rejects(self, load, rows):
        for path in ("a\0b.png", "a" * 5000):
            with pytest.raises(UnreadableImage, match="cannot be read: "):
                load(train_data_dir=rows([{"bytes": None, "path": path}] * 4))

    def test_devices_are_not_read(self):
        with pytest.raises(UnreadableImage, match="/dev/zero cannot be read: it is not a regular file"):
            read_image("/dev/zero", "/dev/zero")

    def test_folders_of_images_ignore_pipes_and_links_outside(self, load, image_folder, secret):
        folder = image_folder(["0.png", "1.png"])
        os.mkfifo(folder / "2.png")
        os.mkfifo(folder / "metadata.jsonl")
        os.mkfifo(folder / "dataset_dict.json")
        os.mkfifo(folder / "a.parquet")
        (folder / "3.png").symlink_to(secret)
        ignored = "ignored: 4 special files, 1 link out of the folder"
        assert load(train_data_dir=folder).description == f"the folder pictures, 2 images ({ignored})"

    def test_saved_datasets_cannot_name_files_outside(self, load, saved, png, tmp_path):
        saved({"image": [png()] * 4}, folder="other")
        folder = saved({"image": [png()] * 4})
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": "../other/data-00000-of-00001.arrow"}]
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match=r"^the folder saved cannot be read because of .*\.arrow: it is"):
            load(train_data_dir=folder)
        next(folder.glob("*.arrow")).unlink()
        os.mkfifo(folder / "data-00000-of-00001.arrow")
        with pytest.raises(UserError, match=r"^the folder saved must have only regular files, got 1 special file$"):
            load(train_data_dir=folder)

    def test_saved_datasets_cannot_name_memory_outside(self, load, saved, png):
        """Reading there would end the process with a segmentation fault."""
        images = [png()] * 4
        file = next(saved({"image": images}).glob("*.arrow"))
        ends = struct.pack("<5i", *(len(images[0]) * k for k in range(5)))
        content = file.read_bytes()
        assert content.count(ends) == 1
        file.write_bytes(content.replace(ends, ends[:-4] + struct.pack("<i", 2**31 - 1)))
        with pytest.raises(UserError, match=r"^cannot load the folder saved: .*larger than values array"):
            load(train_data_dir=file.parent)


class TestSizes:
    def test_rejects_large_files_without_reading_them(self, load, image_folder):
        folder = image_folder(["0.png", "1.png"])
        for k in range(2):
            os.truncate(folder / f"{k}.png", 2**40)
        with pytest.raises(UnreadableImage, match=r"it has 1,099,511,627,776 bytes; at most 268,435,456 are accepted"):
            load(train_data_dir=folder)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("width", [10_001, 20_000])
    def test_rejects_images_with_too_many_pixels(self, width):
        with pytest.raises(UnreadableImage, match="it cannot be read: it has more than 100,000,000 pixels, the limit"):
            read_image(huge_png(width, 10_000), "it")

    def test_rejects_narrow_images_that_scaling_would_blow_up(self, load, tmp_path):
        (tmp_path / "narrow").mkdir()
        for k in range(2):
            (tmp_path / "narrow" / f"{k}.png").write_bytes(huge_png(1, 2_000_000))
        message = r"\d\.png cannot be used: its 1 x 2000000 pixels would be scaled to 64 x 128000000; --on_bad_image"
        with pytest.raises(UnreadableImage, match=message):
            load(train_data_dir=tmp_path / "narrow", resolution=64)


def write_tar(folder, files):
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return folder


class TestTarFiles:
    def test_rejects_large_members(self, load, png, tmp_path):
        folder = write_tar(tmp_path / "tar", {"0.png": png()})
        member = tarfile.TarInfo("1.png")
        member.size = 2**40
        with open(folder / "a.tar", "r+b") as file:
            file.seek(2 * tarfile.BLOCKSIZE)
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            file.truncate(file.tell() + member.size + 2 * tarfile.BLOCKSIZE)
        message = r"^a\.tar cannot be read: 1\.png has 1,099,511,627,776 bytes; at most 268,435,456 are accepted$"
        with pytest.raises(UserError, match=message):
            load(train_data_dir=folder, streaming=True)

    def test_rejects_sparse_members(self, load, tmp_path):
        (tmp_path / "tar").mkdir()
        member = tarfile.TarInfo("1.png")
        member.type = tarfile.GNUTYPE_SPARSE
        header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        header[483:495] = tarfile.itn(2**35, 12, tarfile.GNU_FORMAT)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "tar" / "a.tar").write_bytes(bytes(header) + bytes(1024))
        with pytest.raises(UserError, match=r"^a\.tar cannot be read: 1\.png is a sparse file"):
            load(train_data_dir=tmp_path / "tar", streaming=True)

    def test_rejects_labels_that_are_too_large(self, load, png, tmp_path):
        folder = write_tar(tmp_path / "tar", {"0.png": png(), "0.cls": b"9" * 40})
        with pytest.raises(UserError, match=r"^a\.tar cannot be read: "):
            load(train_data_dir=folder, streaming=True, needs_labels=True)


class TestLabels:
    @pytest.mark.parametrize(("label", "largest"), [(10**11, 999_999), (2**64 - 1, 3)])
    def test_rejects_large_labels(self, load, rows, png, label, largest):
        images = [{"bytes": png(), "path": None}] * 4
        folder = rows(images, label=pa.array([0, 1, label, 3], pa.uint64()))
        with pytest.raises(UserError, match=f"must be from 0 to {largest}, got {label} for row 2 of the folder rows$"):
            load(train_data_dir=folder, needs_labels=True)
        with pytest.raises(UserError, match=rf"must be from 0 to 999999, got {label} in a\.parquet$"):
            load(train_data_dir=folder, needs_labels=True, streaming=True)


class TestIgnoredFiles:
    def test_counts_them_by_kind(self, load, image_folder, tmp_path):
        folder = image_folder(["cat/1.png", "cat/2.png", "dog/3.png"])
        (tmp_path / "more").mkdir()
        (folder / "eel").mkdir()
        (folder / "emu").symlink_to(tmp_path / "more")
        (folder / "cat" / "4.png").symlink_to("nowhere")
        for name in ("a.heic", "b.HEIC", "c.svg", "LICENSE", ".hidden"):
            (folder / "dog" / name).write_text("nothing")
        data = load(train_data_dir=folder, needs_labels=True)
        assert data.class_names == ["cat", "dog"]
        assert data.description == (
            "the folder pictures, 3 images (ignored: 2 .heic files, 1 .svg file, 1 broken link, 1 empty folder, "
            "1 file without a suffix, 1 linked folder)"
        )

    def test_counts_images_without_metadata(self, load, image_folder):
        folder = image_folder(["0.png", "1.png", "2.png", "3.png"])
        (folder / "metadata.jsonl").write_text('{"file_name": "0.png"}\n{"file_name": "2.png"}\n')
        description = "the folder pictures, 2 images (ignored: 2 images without an entry in the metadata)"
        assert load(train_data_dir=folder).description == description

    def test_counts_files_next_to_splits_and_tables(self, load, image_folder, png, tmp_path):
        folder = image_folder(["train/0.png", "train/1.png", "test/2.png", "other/3.png", "4.png"])
        description = "the folder pictures, 2 images (ignored: 2 images outside of the splits train, test)"
        assert load(train_data_dir=folder).description == description
        table = datasets.Dataset.from_dict({"image": [png()] * 4}, features=datasets.Features(image=datasets.Image()))
        for name in ("train-0", "extra"):
            table.to_parquet(folder / f"{name}.parquet")
        for streaming in (False, True):
            found = load(train_data_dir=folder, streaming=streaming).description
            assert found.endswith(" (ignored: 5 .png files, 1 .parquet file)")

    def test_names_images_outside_of_class_folders(self, load, image_folder):
        folder = image_folder(["a/a.png", "b/b.png", "loose.png"])
        message = (
            "the folder pictures has 1 image at another depth than the others, such as loose.png; put each image "
            "directly into its class folder"
        )
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            load(train_data_dir=folder, needs_labels=True)
        assert load(train_data_dir=folder).description == "the folder pictures, 3 images"
