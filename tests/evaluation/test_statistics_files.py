"""Files of statistics: what was written comes back, published ones are read, and others are refused in a sentence."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scalelong_diffusers.evaluation import FeatureStatistics


@pytest.fixture
def statistics():
    features = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    about = {"resolution": 8, "split": "train"}
    wide = features.double()
    return FeatureStatistics(wide.mean(0), wide.T.cov(), features, 30, "some/vit", "12345678", about)


def test_what_is_saved_comes_back(statistics, tmp_path):
    statistics.save(tmp_path / "new" / "some.safetensors")
    loaded = FeatureStatistics.load(tmp_path / "new" / "some.safetensors")
    for name in ("mean", "covariance", "kept"):
        assert torch.equal(getattr(loaded, name), getattr(statistics, name))
        assert getattr(loaded, name).dtype == getattr(statistics, name).dtype
    for name in ("n", "features", "features_fingerprint", "about"):
        assert getattr(loaded, name) == getattr(statistics, name)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["some.safetensors"], "nothing half-written"


def test_published_statistics_are_those_of_inception(tmp_path):
    np.savez(tmp_path / "cifar10.npz", mu=np.zeros(2048), sigma=np.eye(2048, dtype=np.float32))
    loaded = FeatureStatistics.load(tmp_path / "cifar10.npz")
    assert (loaded.features, loaded.num_features, loaded.n, loaded.kept) == ("inception", 2048, None, None)
    assert loaded.covariance.dtype == torch.float64


def write(path, **changes):
    told = {"version": 1, "n": 3, "features": "x", "features_fingerprint": "0", "about": {}, **changes.pop("told", {})}
    tensors = {"mean": torch.zeros(2), "covariance": torch.eye(2), **changes}
    save_file(tensors, path, {"scalelong": json.dumps(told)})


def spoil(path):
    """In the middle of what is compressed, which zlib does not get over."""
    content = bytearray(path.read_bytes())
    content[80:100] = b"\xff" * 20
    path.write_bytes(content)


DAMAGED = {
    "cut.safetensors": (lambda path: (write(path), path.write_bytes(path.read_bytes()[:-9])), "or is damaged"),
    "other.safetensors": (lambda path: save_file({"weight": torch.zeros(2)}, path), "holds no statistics of features"),
    "newer.safetensors": (lambda path: write(path, told={"version": 99}), "a newer version of scalelong-diffusers"),
    "shape.safetensors": (lambda path: write(path, covariance=torch.eye(3)), "a mean of shape (2,) and a covariance"),
    "nan.safetensors": (lambda path: write(path, mean=torch.full((2,), torch.nan)), "numbers that are not finite"),
    "text.npz": (lambda path: path.write_text("mu and sigma"), "or is damaged"),
    "empty.npz": (lambda path: path.write_text(""), "or is damaged"),
    "cut.npz": (
        lambda path: (np.savez(path, mu=np.zeros(9), sigma=np.eye(9)), path.write_bytes(path.read_bytes()[:300])),
        "or is damaged",
    ),
    "spoilt.npz": (
        lambda path: (np.savez_compressed(path, mu=np.zeros(9), sigma=np.eye(9)), spoil(path)),
        "or is damaged",
    ),
    "arrays.npz": (lambda path: np.savez(path, mean=np.zeros(2)), "it has the arrays mean, and statistics are 'mu'"),
    "pickle.npz": (lambda path: np.savez(path, mu=np.array([{}]), sigma=np.eye(1)), "or is damaged"),
    "statistics.pt": (lambda path: path.write_text(""), "whose names end in .safetensors or .npz"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_in_a_sentence(name, tmp_path):
    damage, message = DAMAGED[name]
    damage(tmp_path / name)
    with pytest.raises(ValueError, match=name) as raised:
        FeatureStatistics.load(tmp_path / name)
    assert message in str(raised.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        FeatureStatistics.load(tmp_path / "none.npz")
