"""An adapter on the Hub: pushed with a card that says what it is loaded into, and loaded from there."""

import pytest

from scalelong_diffusers.hub.sharing import push_adapter
from scalelong_diffusers.training.fine_tuning import prepare_for_fine_tuning


COMMON = """
import sys
import diffusers, torch
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from scalelong_diffusers import load_adapter, push_adapter, push_to_hub
from scalelong_diffusers.training.fine_tuning import prepare_for_fine_tuning

diffusers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def drawn(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    images = pipe("a red circle", num_inference_steps=2, generator=generator, output_type="np").images
    return round(float(abs(images - 0.5).sum()), 3)
"""

PUSH = (
    COMMON
    + """
push_to_hub(diffusers.StableDiffusionPipeline.from_pretrained("base"), "tester/base")
for seed, revision in enumerate((None, "other")):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained("tester/base")
    trained = prepare_for_fine_tuning(pipe, {"method": "ls", "reduction": 4}, lora_rank=2, lora_alpha=6)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.3)
    push_adapter(pipe, "tester/adapter", revision=revision, card={"training_data": "shapes"})
    print(drawn(pipe))

card = ModelCard(open(hf_hub_download("tester/adapter", "README.md")).read())
card.text += "\\nWhat I found out."
HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="tester/adapter")
push_adapter(pipe, "tester/adapter", create_pr=True, base_model="tester/base")
"""
)

LOAD = (
    COMMON
    + """
for revision in (None, "other"):
    pipe = diffusers.DiffusionPipeline.from_pretrained("tester/base")
    print(drawn(load_adapter(pipe, "tester/adapter", revision=revision)))
pipe = diffusers.DiffusionPipeline.from_pretrained("tester/base")
for source, revision in (("tester/adapter", "nowhere"), ("tester/none", None), ("tester/base", None)):
    try:
        load_adapter(pipe, source, revision=revision)
    except (OSError, ValueError) as error:
        print(error)
print(type(pipe.unet).__name__)
"""
)

CARDS = (
    COMMON
    + """
for revision in ("other", "refs/pr/1"):
    path = hf_hub_download("tester/adapter", "README.md", revision=revision)
    print(open(path).read())
    print("=====")
"""
)


@pytest.mark.slow
def test_pushed_and_loaded_by_others(build_kind, hub, tmp_path):
    build_kind("sd1").save_pretrained(tmp_path / "base")
    pushed = hub(PUSH).stdout.splitlines()
    loaded = hub(LOAD, home="another", token=hub.reader_token).stdout.splitlines()
    assert loaded[:2] == pushed
    assert pushed[0] != pushed[1]
    assert "tester/adapter has no branch, tag or commit 'nowhere'" in loaded[2]
    assert "tester/none is neither a local folder nor a repository" in loaded[3]
    assert "tester/base has no adapter: there is no skip_scaling.json" in loaded[4]
    assert loaded[5] == "UNet2DConditionModel"

    other, pull_request, _ = hub(CARDS).stdout.split("=====")
    for line in (
        "base_model: tester/base",
        "base_model_relation: adapter",
        "pipeline_tag: text-to-image",
        "`pip install 'scalelong-diffusers[lora]'`",
        "An adapter of [tester/base](https://huggingface.co/tester/base)",
        "from diffusers import StableDiffusionPipeline",
        "from scalelong_diffusers import load_adapter",
        'pipe = StableDiffusionPipeline.from_pretrained("tester/base")',
        'load_adapter(pipe, "tester/adapter", revision="other")',
        "learnable scaling (LS)",
        "| data | shapes |",
    ):
        assert line in other, line
    assert 'load_adapter(pipe, "tester/adapter")\n' in pull_request
    assert "What I found out." in pull_request


@pytest.mark.parametrize("saved", [True, False])
def test_a_base_that_is_not_on_the_hub(build_kind, saved, tmp_path):
    pipe = build_kind("sd1")
    if saved:
        pipe.save_pretrained(tmp_path)
        pipe = type(pipe).from_pretrained(tmp_path)
    prepare_for_fine_tuning(pipe, "cs", lora_rank=2)
    with pytest.raises(
        ValueError, match=f"base_model must name the repository .* from {tmp_path if saved else 'nowhere'}"
    ):
        push_adapter(pipe, "user/adapter")
