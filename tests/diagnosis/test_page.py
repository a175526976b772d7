"""The page of a diagnosis in a real browser."""

import dataclasses
from functools import partial

import pytest
import torch
from web_pages import check_contrast

from scalelong_diffusers.diagnosis.diagnose import diagnose
from scalelong_diffusers.diagnosis.page import build_page
from scalelong_diffusers.diagnosis.rules import RULES


NAME = "<img src='https://example.com/x.png'> & \u001b[31m"


@pytest.fixture
def diagnosis(build, batches, noising):
    return diagnose(build(num_layers=20, skip_scaling="ls"), batches, noising, show_progress=False)


@pytest.fixture
def opened(open_page, diagnosis, tmp_path):
    (tmp_path / "index.html").write_text(build_page(diagnosis, NAME, "some pictures"))
    return partial(open_page, tmp_path / "index.html")


@pytest.mark.slow
def test_loads_nothing_and_escapes_names(opened, tmp_path):
    page = opened()
    assert page.errors == []
    assert [url for url in page.requested if not url.startswith("data:")] == [(tmp_path / "index.html").as_uri()]
    assert page.locator("h1").inner_text().startswith("Diagnosis of <img src=")


@pytest.mark.slow
def test_starts_with_the_verdict_and_states_all_rules(opened, diagnosis):
    page = opened()
    assert page.locator("p.lead").all_inner_texts() == diagnosis.verdict
    assert "some pictures" in page.locator("main > p").last.inner_text()
    terms = page.locator("dt").all_inner_texts()
    assert [term.split(":")[0] for term in terms] == [rule.name for rule in RULES]
    assert [term.endswith(", applies") for term in terms] == [finding.applies for finding in diagnosis.findings]
    assert page.locator("dd").all_inner_texts() == [rule.statement for rule in RULES]
    skips = page.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[1] for row in skips] == [f"out_blocks.{k}.skip_proj" for k in reversed(range(10))]


@pytest.mark.slow
def test_charts_say_what_they_show(opened):
    page = opened()
    labels = page.evaluate("[...document.querySelectorAll('svg[role=img]')].map(s => s.getAttribute('aria-label'))")
    names = ["Root mean square", "Gradient norm", "Variation", "Largest / median", "|x_t|^2", "|eps|^2", "Change",
             "Largest |activation|", "Largest |activation| over time", "Largest |activation|, untrained"]  # fmt: skip
    assert all(label.startswith(name) for label, name in zip(labels, names, strict=True))
    count = "[...document.querySelectorAll('svg')].map(svg => svg.querySelectorAll('polyline').length)"
    assert page.evaluate(count) == [2, 2, 2, 2, 2, 1, 2, 1, 1, 1]
    # Curves stay inside the drawing.
    boxes = page.evaluate(
        "[...document.querySelectorAll('polyline')].map(line => {"
        "  const box = line.getBBox(); return [box.x, box.y, box.x + box.width, box.y + box.height]; })"
    )
    assert all(left >= 0 and top >= 0 and right <= 640 and bottom <= 320 for left, top, right, bottom in boxes)


@pytest.mark.slow
def test_fits_a_phone(opened):
    page = opened(width=390, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.tabIndex)"
    )
    assert wide == [0]
    heights = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10


@pytest.mark.slow
def test_fits_four_printed_sheets(opened, tmp_path):
    page = opened()
    page.emulate_media(media="print")
    assert page.pdf(format="A4").count(b"/Type /Page\n") <= 4
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 without Chromium's margins
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > document.body.clientWidth).length"
    assert page.evaluate(cut) == 0


@pytest.mark.slow
def test_text_has_enough_contrast(opened):
    check_contrast(opened())


def test_values_that_are_not_finite_have_no_chart(build, batches, noising):
    model = build()
    with torch.no_grad():
        model.mid_block.mlp.fc1.weight[0, 0] = torch.nan
    page = build_page(diagnose(model, batches, noising, show_progress=False), "broken", "noise")
    assert "16 of 16 samples have losses or gradients that are not finite" in page
    assert "Gradient norm: too few finite values for a chart." in page


def test_a_model_with_one_skip_has_no_charts_over_skips(build, batches, noising):
    diagnosis = diagnose(build(num_layers=2), batches, noising, show_progress=False)
    page = build_page(dataclasses.replace(diagnosis, verdict=["Calm."]), "small", "noise")
    assert "Root mean square: too few finite values" in page
