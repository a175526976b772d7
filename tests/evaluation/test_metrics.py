"""The figures themselves, on features: closed forms, an independent implementation, and what rounding does."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from scalelong_diffusers.evaluation import FeatureStatistics, frechet_distance, kernel_distance, sample_size_warnings
from scalelong_diffusers.evaluation.statistics import Moments


def gaussian(mean, covariance) -> FeatureStatistics:
    as_tensor = [torch.as_tensor(np.asarray(x), dtype=torch.float64) for x in (mean, covariance)]
    return FeatureStatistics(*as_tensor, None, 1000, "made", "up")


def statistics_of(features: torch.Tensor, batch_size: int = 1000) -> FeatureStatistics:
    moments = Moments(features.shape[1])
    for batch in features.split(batch_size):
        moments.add(batch)
    n, mean, covariance, kept = moments.finish()
    return FeatureStatistics(mean, covariance, kept, n, "made", "up")


def normal(n, dimensions, seed=0, shift=0.0, scale=1.0) -> torch.Tensor:
    mix = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(99)) / dimensions**0.5
    return scale * torch.randn(n, dimensions, generator=torch.Generator().manual_seed(seed)) @ mix + shift


@pytest.fixture
def covariance():
    return np.cov(normal(200, 5).T)


class TestFid:
    # 768 pooled features of a usual ViT, fewer images than those, and one image more than is needed at all.
    @pytest.mark.parametrize(("n", "dimensions"), [(500, 16), (100, 768), (2, 64)])
    def test_of_a_set_with_itself_is_0(self, n, dimensions):
        features = normal(n, dimensions, shift=3.0, scale=20.0)
        again = statistics_of(features.flip(0), batch_size=7)
        assert abs(frechet_distance(statistics_of(features), again)) < 1e-6

    def test_torchmetrics_own_roots_would_not_be(self):
        """Why the trace is taken from singular values."""
        features = normal(100, 768, shift=3.0, scale=20.0).double()
        metric = torchmetrics_fid(768)
        metric.update(features, real=True)
        metric.update(features, real=False)
        assert abs(metric.compute().item()) > 1e-6

    def test_of_a_shift_is_its_square(self, covariance):
        shift = np.arange(5.0)
        distance = frechet_distance(gaussian(np.zeros(5), covariance), gaussian(shift, covariance))
        assert distance == pytest.approx(30, abs=1e-9)

    def test_of_a_wider_gaussian(self, covariance):
        """C and s^2 C commute: tr(C + s^2 C - 2 s C) = (s - 1)^2 tr C."""
        distance = frechet_distance(gaussian(np.zeros(5), covariance), gaussian(np.zeros(5), 9 * covariance))
        assert distance == pytest.approx(4 * np.trace(covariance), abs=1e-9)

    def test_of_two_dimensions_that_do_not_commute(self):
        """tr (AB)^(1/2) = (tr AB + 2 det(AB)^(1/2))^(1/2) in two dimensions."""
        a, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.5], [-0.5, 4.0]])
        root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
        expected = 1 + np.trace(a + b) - 2 * root
        assert frechet_distance(gaussian([0, 0], a), gaussian([0, 1], b)) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize(("n", "tolerance"), [(400, 1e-9), (30, 1e-5)])
    def test_is_that_of_torchmetrics(self, n, tolerance):
        one, other = normal(n, 64), normal(n, 64, seed=1, shift=0.1, scale=1.2)
        metric = torchmetrics_fid(64)
        metric.update(one.double(), real=True)
        metric.update(other.double(), real=False)
        distance = frechet_distance(statistics_of(one), statistics_of(other))
        assert distance == pytest.approx(metric.compute().item(), abs=tolerance)
        assert distance > 1


class Given(nn.Module):
    """Features in the place of images."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features):
        return features


def torchmetrics_fid(num_features: int) -> FrechetInceptionDistance:
    return FrechetInceptionDistance(Given(num_features))


class TestKid:
    def test_is_the_unbiased_estimate_of_the_mmd_of_a_cubic_kernel(self):
        one, other = normal(40, 6).double(), normal(40, 6, seed=1, shift=0.5).double()

        def kernel(x, y):
            return (x @ y.T / 6 + 1) ** 3

        def without_itself(k):
            return (k.sum() - k.trace()) / (40 * 39)

        expected = without_itself(kernel(one, one)) + without_itself(kernel(other, other))
        expected -= 2 * kernel(one, other).mean()
        mean, deviation = kernel_distance(statistics_of(one.float()), statistics_of(other.float()))
        assert mean == pytest.approx(expected.item(), rel=1e-5)  # of 40 images every subset is the whole
        assert deviation == pytest.approx(0, abs=1e-9)

    def test_depends_on_its_seed_alone_and_leaves_torchs_generator_as_it_was(self):
        one, other = statistics_of(normal(1100, 4)), statistics_of(normal(1100, 4, seed=1))
        torch.manual_seed(5)
        first = kernel_distance(one, other, seed=3)
        after = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1))
        assert kernel_distance(one, other, seed=3) == first
        assert kernel_distance(one, other, seed=4) != first

    def test_leaves_the_generators_of_gpus_as_they_are(self, monkeypatch):
        seeded = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        kernel_distance(statistics_of(normal(10, 2)), statistics_of(normal(10, 2, seed=1)))
        assert seeded == []

    def test_needs_features(self):
        whole = statistics_of(normal(10, 2))
        with pytest.raises(ValueError, match="their mean and covariance alone"):
            kernel_distance(whole, gaussian([0, 0], np.eye(2)))

    def test_warns_of_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel_distance(statistics_of(normal(10, 2)), statistics_of(normal(10, 2, seed=1)))


def test_moments_are_the_unbiased_ones_whatever_the_batches():
    features = normal(50, 3, shift=2.0)
    statistics = statistics_of(features, batch_size=7)
    assert statistics.n == 50
    np.testing.assert_allclose(statistics.mean, features.double().mean(0), atol=1e-12)
    np.testing.assert_allclose(statistics.covariance, np.cov(features.double().T), atol=1e-12)
    assert torch.equal(statistics.kept, features)


@pytest.mark.parametrize("n", [0, 1])
def test_a_covariance_takes_two_images(n):
    with pytest.raises(ValueError, match=rf"takes two images at least, and there (is|are) {n}"):
        statistics_of(normal(n, 2))


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (
            64,
            ["64 images do not span 64 features, so that their covariance is singular", "subsets of 64, not of 1,000"],
        ),
        (2000, ["it compares with that of 2,000 alone"]),
        (10_000, []),
    ],
)
def test_small_sets_are_warned_of(n, said):
    warned = sample_size_warnings(("fid", "kid"), n, 64)
    assert len(warned) == len(said)
    assert all(part in warning for part, warning in zip(said, warned))
