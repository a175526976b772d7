"""Linear probes: features of every block, the classifier, and the page."""

from dataclasses import replace

import pytest
import torch

from scalelong_diffusers.diagnosis.probe import (
    PIXELS,
    FeatureObserver,
    LabeledImages,
    block_names,
    collect_features,
    fit_probe,
    probe,
)
from scalelong_diffusers.diagnosis.probe_page import build_probe_page
from scalelong_diffusers.models.mixin import skip_layout


CONTAINERS = torch.nn.ModuleList | torch.nn.ModuleDict
NAME = "<img src='https://example.com/x.png'> & \u001b[31m"


@pytest.fixture
def bright_or_dark():
    """Return batches of noise around 1 or -1, with labels."""

    def make(first: int, count: int, size: int = 8) -> LabeledImages:
        generator = torch.Generator().manual_seed(first)
        labels = torch.arange(first, first + count) % 2
        clean = 2.0 * labels.view(-1, 1, 1, 1) - 1 + torch.randn(count, 3, size, size, generator=generator)
        return LabeledImages(clean, torch.randn(count, 3, size, size, generator=generator), labels)

    return make


def test_sees_every_block_of_a_uvit(build, noising, bright_or_dark):
    model = build(skip_scaling={"method": "cs", "kappa": 0.5})
    outputs = []
    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.register_forward_hook(lambda block, args, output: outputs.append(output.mean(1)))
    batch = bright_or_dark(0, 4)
    features = collect_features(model, [batch], noising, [3, 9])
    assert list(features.values) == [(name, t) for t in (3, 9) for name in _order_of_pass(2)]
    for t, expected in zip((3, 9), (outputs[:5], outputs[5:])):
        for name, output in zip(block_names(2)[1:], expected, strict=True):
            torch.testing.assert_close(features.values[name, t], output)
        noisy = noising.add_noise(batch.clean, batch.noise, torch.full((4,), t))
        assert torch.equal(features.values[PIXELS, t], noisy.flatten(1))


def _order_of_pass(count: int) -> list[str]:
    """Return the names in the order in which they are observed: a hidden state before the skip that it meets."""
    names = [PIXELS]
    for i in range(count, 0, -1):
        names += ["middle" if i == count else f"decoder {i + 1}", f"encoder {i}"]
    return [*names, "decoder 1"]


@torch.no_grad()
def test_observes_all_kinds_of_models_and_leaves_no_hook(case):
    model, inputs = case.build(), case.make_inputs()
    before = model(**inputs)[0]
    skips = skip_layout(model).find(model)
    observer = FeatureObserver(model, grid=1)
    with observer.attached():
        assert torch.equal(model(**inputs)[0], before)
    without_last = {"decoder 1"} if isinstance(model.get_submodule(skips[0].block), CONTAINERS) else set()
    assert set(observer.features) == set(block_names(len(skips))[1:]) - without_last
    for skip in skips:
        assert observer.features[f"encoder {skip.index}"].shape[1:] == (skip.width,)
    assert all(values.isfinite().all() for values in observer.features.values())
    observer.features.clear()
    model(**inputs)
    assert observer.features == {}


def test_averages_large_images_for_the_baseline(build, noising, bright_or_dark):
    features = collect_features(build(sample_size=48), [bright_or_dark(0, 2, size=48)], noising, [0])
    assert features.values[PIXELS, 0].shape == (2, 3 * 32 * 32)


def test_averages_the_patches_of_a_uvit_over_the_cells_of_a_grid(build, noising, bright_or_dark):
    model = build(num_class_embeds=3)  # one more token that belongs to no patch
    outputs = []
    model.in_blocks[0].register_forward_hook(lambda block, args, output: outputs.append(output))
    labels = {"class_labels": torch.tensor([2, 2])}
    batch = replace(bright_or_dark(0, 2), conditions=labels)
    features = collect_features(model, [batch], noising, [0], grid=2).values["encoder 1", 0]
    patches = outputs[0][:, 2:].unflatten(1, (2, 2, 2, 2))  # row, its half, column, its half
    torch.testing.assert_close(features, patches.mean((2, 4)).permute(0, 3, 1, 2).flatten(1))


@torch.no_grad()
def test_a_grid_is_at_most_as_fine_as_the_features(ddpm):
    model, inputs = ddpm.build(), ddpm.make_inputs()
    observer = FeatureObserver(model, grid=3)
    with observer.attached():
        model(**inputs)
    assert observer.features["encoder 1"].shape[1] == 9 * observer.skips[1].width
    deepest = observer.skips[len(observer.skips)]
    size = inputs["sample"].shape[-1] // 2
    assert observer.features["middle"].shape[1] == min(3, size) ** 2 * deepest.hidden_width


def test_classifier_finds_what_is_linear():
    torch.manual_seed(0)
    features = torch.randn(2000, 6) * torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0, 0.0]) + 5
    signs = (features[:, 0] > 5).long() + 2 * (features[:, 2] > 5).long()
    accuracy = _accuracy(features, signs, 4)
    assert accuracy > 0.97
    assert _accuracy(features, torch.randint(4, (2000,)), 4) < 0.4  # nothing to find
    product = ((features[:, 0] - 5) * (features[:, 2] - 5) > 0).long()
    assert _accuracy(features, product, 2) < 0.6  # not linear


def _accuracy(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> float:
    classify = fit_probe(features[:1000], labels[:1000], num_classes)
    return (classify(features[1000:]) == labels[1000:]).float().mean().item()


def test_classifier_is_the_best_one_for_gaussians_with_equal_covariances():
    torch.manual_seed(0)
    labels = torch.arange(6000) % 3
    features = torch.randn(6000, 4) + torch.nn.functional.one_hot(labels, 4)
    best = features[3000:, :3].argmax(1)
    found = fit_probe(features[:3000], labels[:3000], 3)(features[3000:])
    assert (found == best).float().mean() > 0.95


def test_probe_of_a_model(build, noising, bright_or_dark):
    model = build().train()
    result = probe(model, [bright_or_dark(0, 40), bright_or_dark(40, 40)], [bright_or_dark(80, 30)], noising, [0, 500])
    assert model.training
    assert (result.num_images, result.num_test_images, result.num_classes, result.chance) == (80, 30, 2, 0.5)
    assert [block.block for block in result.blocks] == block_names(2)
    pixels, *blocks = result.blocks
    assert pixels.width == 3 * 8 * 8
    assert pixels.accuracies[0] == 1
    assert blocks[0].accuracies[0] > 0.9
    assert blocks[-1].where == "out_blocks.1.skip_proj"
    assert result.summary.startswith("A linear probe of ")
    again = probe(model, [bright_or_dark(0, 40), bright_or_dark(40, 40)], [bright_or_dark(80, 30)], noising, [0, 500])
    assert again == result


@pytest.fixture
def opened(open_page, build, noising, bright_or_dark, tmp_path):
    result = probe(build(num_layers=6), [bright_or_dark(0, 40)], [bright_or_dark(40, 30)], noising, [0, 400])
    (tmp_path / "index.html").write_text(build_probe_page(result, NAME, "some pictures"))

    def run(**options):
        return open_page(tmp_path / "index.html", **options), result

    return run


@pytest.mark.slow
def test_page_shows_a_chart_per_timestep_and_the_table(opened, tmp_path):
    page, result = opened()
    assert page.errors == []
    assert [url for url in page.requested if not url.startswith("data:")] == [(tmp_path / "index.html").as_uri()]
    assert page.locator("h1").inner_text().startswith("Linear probes of <img src=")
    assert page.locator("p.lead").inner_text() == result.summary
    labels = page.evaluate("[...document.querySelectorAll('svg[role=img]')].map(s => s.getAttribute('aria-label'))")
    assert [label.split(" by ")[0] for label in labels] == ["Accuracy in %, timestep 0", "Accuracy in %, timestep 400"]
    count = "[...document.querySelectorAll('svg')].map(svg => svg.querySelectorAll('polyline').length)"
    assert page.evaluate(count) == [2, 2]
    rows = page.locator("tbody tr, table tr").all_inner_texts()
    assert rows[1].split()[0] == PIXELS
    assert len(rows) == 1 + len(result.blocks)


@pytest.mark.slow
def test_page_fits_a_phone(opened):
    page, _ = opened(width=390, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
