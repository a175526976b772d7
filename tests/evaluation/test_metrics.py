"""FID and KID on given features: closed forms, an independent implementation, and rounding."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from scalelong_diffusers import UserError
from scalelong_diffusers.evaluation import FeatureStatistics, frechet_distance, kernel_distance, sample_size_warnings
from scalelong_diffusers.evaluation.metrics import Moments


def gaussian(mean, covariance) -> FeatureStatistics:
    as_tensor = [torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (mean, covariance)]
    return FeatureStatistics(*as_tensor, None, 1000, "network", "fingerprint")


def statistics_of(features: torch.Tensor, batch_size: int = 1000) -> FeatureStatistics:
    moments = Moments(features.shape[1])
    for batch in features.split(batch_size):
        moments.add(batch)
    n, mean, covariance, kept = moments.finish()
    return FeatureStatistics(mean, covariance, kept, n, "network", "fingerprint")


def normal(n, dimensions, seed=0, shift=0.0, scale=1.0) -> torch.Tensor:
    mix = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(99)) / dimensions**0.5
    return scale * torch.randn(n, dimensions, generator=torch.Generator().manual_seed(seed)) @ mix + shift


@pytest.fixture
def covariance():
    return np.cov(normal(200, 5).T)


class TestFid:
    # Many images; fewer images than the 768 features of a ViT-B; and the smallest number of images.
    @pytest.mark.parametrize(("n", "dimensions"), [(500, 16), (100, 768), (2, 64)])
    def test_is_0_between_a_set_and_itself(self, n, dimensions):
        features = normal(n, dimensions, shift=3.0, scale=20.0)
        again = statistics_of(features.flip(0), batch_size=7)
        assert abs(frechet_distance(statistics_of(features), again)) < 1e-6

    def test_torchmetrics_is_not_0_with_few_images(self):
        """This is why the trace is computed from singular values."""
        features = normal(100, 768, shift=3.0, scale=20.0).double()
        metric = torchmetrics_fid(768)
        metric.update(features, real=True)
        metric.update(features, real=False)
        assert abs(metric.compute().item()) > 1e-6

    def test_of_a_shift_is_its_squared_length(self, covariance):
        shift = np.arange(5.0)
        distance = frechet_distance(gaussian(np.zeros(5), covariance), gaussian(shift, covariance))
        assert distance == pytest.approx(30, abs=1e-9)

    def test_of_a_wider_gaussian(self, covariance):
        """C and s^2 C commute: tr(C + s^2 C - 2 s C) = (s - 1)^2 tr C."""
        distance = frechet_distance(gaussian(np.zeros(5), covariance), gaussian(np.zeros(5), 9 * covariance))
        assert distance == pytest.approx(4 * np.trace(covariance), abs=1e-9)

    def test_of_covariances_that_do_not_commute(self):
        """tr (AB)^(1/2) = (tr AB + 2 det(AB)^(1/2))^(1/2) in two dimensions."""
        a, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.5], [-0.5, 4.0]])
        root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
        expected = 1 + np.trace(a + b) - 2 * root
        assert frechet_distance(gaussian([0, 0], a), gaussian([0, 1], b)) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(("n", "tolerance"), [(400, 1e-9), (30, 1e-5)])
    def test_equals_torchmetrics(self, n, tolerance):
        one, other = normal(n, 64), normal(n, 64, seed=1, shift=0.1, scale=1.2)
        metric = torchmetrics_fid(64)
        metric.update(one.double(), real=True)
        metric.update(other.double(), real=False)
        distance = frechet_distance(statistics_of(one), statistics_of(other))
        assert distance == pytest.approx(metric.compute().item(), abs=tolerance)
        assert distance > 1


class Given(nn.Module):
    """A network that receives features instead of images."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features):
        return features


def torchmetrics_fid(num_features: int) -> FrechetInceptionDistance:
    return FrechetInceptionDistance(Given(num_features))


class TestKid:
    def test_is_the_unbiased_mmd_of_a_cubic_kernel(self):
        one, other = normal(40, 6).double(), normal(40, 6, seed=1, shift=0.5).double()

        def kernel(x, y):
            return (x @ y.T / 6 + 1) ** 3

        def off_diagonal(k):
            return (k.sum() - k.trace()) / (40 * 39)

        expected = off_diagonal(kernel(one, one)) + off_diagonal(kernel(other, other))
        expected -= 2 * kernel(one, other).mean()
        mean, deviation = kernel_distance(statistics_of(one.float()), statistics_of(other.float()))
        assert mean == pytest.approx(expected.item(), rel=1e-5)  # every subset is the full set of 40 images
        assert deviation == pytest.approx(0, abs=1e-9)

    def test_depends_only_on_its_seed_and_keeps_the_global_generator(self, monkeypatch):
        monkeypatch.setattr("scalelong_diffusers.evaluation.metrics.KID_SUBSET_SIZE", 50)
        one, other = statistics_of(normal(60, 4)), statistics_of(normal(60, 4, seed=1))
        torch.manual_seed(5)
        first = kernel_distance(one, other, seed=3)
        after = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1))
        assert kernel_distance(one, other, seed=3) == first
        assert kernel_distance(one, other, seed=4) != first

    def test_does_not_seed_gpus(self, monkeypatch):
        seeded = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        kernel_distance(statistics_of(normal(10, 2)), statistics_of(normal(10, 2, seed=1)))
        assert seeded == []

    def test_needs_features(self):
        complete = statistics_of(normal(10, 2))
        with pytest.raises(UserError, match="only a mean and covariance"):
            kernel_distance(complete, gaussian([0, 0], np.eye(2)))

    def test_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel_distance(statistics_of(normal(10, 2)), statistics_of(normal(10, 2, seed=1)))


def test_moments_do_not_depend_on_the_batches():
    features = normal(50, 3, shift=2.0)
    statistics = statistics_of(features, batch_size=7)
    assert statistics.n == 50
    np.testing.assert_allclose(statistics.mean, features.double().mean(0), atol=1e-12)
    np.testing.assert_allclose(statistics.covariance, np.cov(features.double().T), atol=1e-12)
    assert torch.equal(statistics.features, features)


@pytest.mark.parametrize("n", [0, 1])
def test_covariance_needs_two_images(n):
    with pytest.raises(UserError, match=f"needs at least two images, got {n}"):
        statistics_of(normal(n, 2))


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (
            64,
            ["this FID means little: with 64 images for 64 features", "subsets of 64 instead of 1,000"],
        ),
        (2000, ["compare only with FIDs of 2,000 images"]),
        (10_000, []),
    ],
)
def test_warns_about_small_sets(n, expected):
    warnings = sample_size_warnings(("fid", "kid"), n, 64)
    assert len(warnings) == len(expected)
    assert all(part in warning for part, warning in zip(expected, warnings))
