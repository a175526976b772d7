"""Files of statistics: saved ones load again, published ones are read, and damaged ones are rejected."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scalelong_diffusers import UserError
from scalelong_diffusers.evaluation import FeatureStatistics


@pytest.fixture
def statistics():
    features = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    about = {"resolution": 8, "split": "train"}
    wide = features.double()
    return FeatureStatistics(wide.mean(0), wide.T.cov(), features, 30, "some/vit", "12345678", about)


def test_saved_statistics_load_again(statistics, tmp_path):
    statistics.save(tmp_path / "new" / "some.safetensors")
    loaded = FeatureStatistics.load(tmp_path / "new" / "some.safetensors")
    for name in ("mean", "covariance", "features"):
        assert torch.equal(getattr(loaded, name), getattr(statistics, name))
        assert getattr(loaded, name).dtype == getattr(statistics, name).dtype
    for name in ("n", "network", "network_fingerprint", "about"):
        assert getattr(loaded, name) == getattr(statistics, name)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["some.safetensors"], "no partial file"


def test_published_statistics_belong_to_inception(tmp_path):
    np.savez(tmp_path / "cifar10.npz", mu=np.zeros(2048), sigma=np.eye(2048, dtype=np.float32))
    loaded = FeatureStatistics.load(tmp_path / "cifar10.npz")
    assert (loaded.network, loaded.num_features, loaded.n, loaded.features) == ("inception", 2048, None, None)
    assert loaded.covariance.dtype == torch.float64


def write(path, **changes):
    facts = {"version": 2, "n": 3, "network": "x", "network_fingerprint": "0", "about": {}}
    facts |= changes.pop("facts", {})
    tensors = {"mean": torch.zeros(2), "covariance": torch.eye(2), **changes}
    save_file(tensors, path, {"scalelong": json.dumps(facts)})


def corrupt(path):
    """Overwrite bytes in the middle of the compressed data."""
    content = bytearray(path.read_bytes())
    content[80:100] = b"\xff" * 20
    path.write_bytes(content)


DAMAGED = {
    "cut.safetensors": (
        lambda path: (write(path), path.write_bytes(path.read_bytes()[:-9])),
        "cannot be read as a file of statistics",
    ),
    "other.safetensors": (
        lambda path: save_file({"weight": torch.zeros(2)}, path),
        "cannot be read as a file of statistics",
    ),
    "newer.safetensors": (
        lambda path: write(path, facts={"version": 99}),
        "format version 99, and this package reads version 2",
    ),
    "shape.safetensors": (
        lambda path: write(path, covariance=torch.eye(3)),
        "mean and covariance must be finite and of matching shapes, got",
    ),
    "nan.safetensors": (lambda path: write(path, mean=torch.full((2,), torch.nan)), "must be finite"),
    "text.npz": (lambda path: path.write_text("mu and sigma"), "cannot be read as a file of statistics"),
    "empty.npz": (lambda path: path.write_text(""), "cannot be read as a file of statistics"),
    "cut.npz": (
        lambda path: (np.savez(path, mu=np.zeros(9), sigma=np.eye(9)), path.write_bytes(path.read_bytes()[:300])),
        "cannot be read as a file of statistics",
    ),
    "corrupt.npz": (
        lambda path: (np.savez_compressed(path, mu=np.zeros(9), sigma=np.eye(9)), corrupt(path)),
        "cannot be read as a file of statistics",
    ),
    "arrays.npz": (lambda path: np.savez(path, mean=np.zeros(2)), "mu is not a file in the archive"),
    "pickle.npz": (
        lambda path: np.savez(path, mu=np.array([{}]), sigma=np.eye(1)),
        "cannot be read as a file of statistics",
    ),
    "statistics.pt": (lambda path: path.write_text(""), "a file of statistics (.safetensors or .npz)"),
}


def test_rejects_damaged_files(tmp_path):
    for name, (damage, message) in DAMAGED.items():
        damage(tmp_path / name)
        with pytest.raises(UserError, match=name) as raised:
            FeatureStatistics.load(tmp_path / name)
        assert message in str(raised.value), name


def test_rejects_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none.npz cannot be read as a file of statistics .*: .*No such file"):
        FeatureStatistics.load(tmp_path / "none.npz")
