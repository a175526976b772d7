"""Sharing on the Hub: the real client, in processes of its own, against a Hub on loopback."""

import re

import pytest


# What the processes below have in common: tiny pipelines of three kinds, and a way to compare what they draw.
COMMON = """
import diffusers, torch
from diffusers import DDIMPipeline, DDIMScheduler
from PIL import Image
from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline, ScaleLongUNet2DModel, UViTModel, load_pipeline, push_to_hub, skip_connections
)

diffusers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def unet(seed=0):
    torch.manual_seed(seed)
    return ScaleLongUNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, skip_scaling="cs",
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()


def classes(seed=0):
    torch.manual_seed(seed)
    model = UViTModel(
        sample_size=8, hidden_size=32, num_layers=4, num_attention_heads=2, num_class_embeds=4, skip_scaling="ls"
    )
    names = ["cat", "dog", "bird"]
    return ScaleLongClassConditionalPipeline(model.eval(), DDIMScheduler(), class_names=names, null_class=3)


def stock():
    return DDIMPipeline(unet(), DDIMScheduler())


def drawn(pipe, *args, **kwargs):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    images = pipe(*args, **kwargs, num_inference_steps=2, generator=generator, output_type="np").images
    return round(float(abs(images - 0.5).sum()), 2)
"""

PUSH = (
    COMMON
    + """
print("pipeline", classes().push_to_hub("tester/classes", private=True, commit_message="first"))
print("branch", classes(seed=1).push_to_hub("tester/classes", revision="ema"))
print("pull request", push_to_hub(classes(seed=2), "tester/classes", create_pr=True))
print("model", unet().push_to_hub("tester/unet"))
print("subfolder", unet(seed=1).push_to_hub("tester/unet", subfolder="other"))
print("stock", push_to_hub(stock(), "tester/stock"))
classes().save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")
print(*(drawn(classes(seed), "dog", guidance_scale=2) for seed in range(3)), drawn(stock()))
"""
)

LOAD = (
    COMMON
    + """
from huggingface_hub import model_info

revisions = (None, "ema", "refs/pr/1")
pipes = [ScaleLongClassConditionalPipeline.from_pretrained("tester/classes", revision=r) for r in revisions]
print(*(drawn(pipe, "dog", guidance_scale=2) for pipe in pipes), drawn(DDIMPipeline.from_pretrained("tester/stock")))
print(type(load_pipeline("tester/saved")).__name__, type(diffusers.DiffusionPipeline.from_pretrained("tester/stock")))
print(drawn(DDIMPipeline(ScaleLongUNet2DModel.from_pretrained("tester/unet"), DDIMScheduler())))
other = ScaleLongUNet2DModel.from_pretrained("tester/unet", subfolder="other")
print(torch.equal(other.conv_in.weight, unet(seed=1).conv_in.weight))
import os
if os.environ["HF_HUB_OFFLINE"] == "0":
    print(*(model_info(f"tester/{name}").private for name in ("classes", "unet")))
"""
)


@pytest.mark.slow
def test_what_is_pushed_is_loaded_elsewhere_and_from_the_cache_without_a_hub(hub):
    pushed = hub(PUSH).stdout.splitlines()
    kinds = [line.rsplit(" ", 1)[0] for line in pushed[:-1]]
    assert kinds == ["pipeline", "branch", "pull request", "model", "subfolder", "stock"]
    assert all("/commit/" in line or "/discussions/1" in line for line in pushed[:-1])
    loaded = hub(LOAD, home="elsewhere").stdout.splitlines()
    assert loaded == [
        pushed[-1],
        "ScaleLongClassConditionalPipeline <class 'diffusers.pipelines.ddim.pipeline_ddim.DDIMPipeline'>",
        pushed[-1].split()[-1],
        "True",
        "True False",
    ]
    cached = hub(LOAD, home="elsewhere", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9").stdout.splitlines()
    assert cached == loaded[:-1]


CARDS = (
    COMMON
    + """
import sys
from huggingface_hub import HfApi, hf_hub_download

grid = Image.new("RGB", (32, 32), "red")
facts = {"training_data": "Fashion-MNIST", "metrics": {"FID-10k": 12.5}, "samples": grid}
classes().push_to_hub("tester/classes", card=facts)
text = open(hf_hub_download("tester/classes", "README.md")).read() + "\\nWritten by hand.\\n"
HfApi().upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id="tester/classes")
classes(seed=1).push_to_hub("tester/classes", card=facts | {"metrics": {"FID-10k": 11.0}})
unet().push_to_hub("tester/unet")
push_to_hub(stock(), "tester/stock")
unet().save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")
for name in ("classes", "unet", "stock", "saved"):
    open(f"{sys.argv[1]}/{name}.md", "w").write(open(hf_hub_download(f"tester/{name}", "README.md")).read())
print(Image.open(hf_hub_download("tester/classes", "samples.png")).size)
"""
)


@pytest.mark.slow
def test_the_card_is_kept_up_to_date_and_its_snippets_work_when_pasted(hub, tmp_path):
    assert hub(CARDS, tmp_path).stdout == "(32, 32)\n"
    cards = {name: (tmp_path / f"{name}.md").read_text() for name in ("classes", "unet", "stock", "saved")}
    assert cards["classes"].endswith("<!-- scalelong: end -->\n\nWritten by hand.\n")
    assert "| FID-10k | 11.0 |" in cards["classes"]
    assert "12.5" not in cards["classes"]
    assert "![samples](samples.png)" in cards["classes"]
    for card in cards.values():
        assert "pip install scalelong-diffusers" in card
        assert hub.owner_token not in card
    assert "automatically generated" not in cards["saved"], "diffusers' own card"
    for name in ("classes", "unet", "stock"):
        (snippet,) = re.findall(r"```python\n(.*?)```", cards[name], flags=re.DOTALL)
        hub(snippet, home=f"home of {name}")
        assert (tmp_path / "image.png").is_file() == (name != "unet")
        (tmp_path / "image.png").unlink(missing_ok=True)


COMPILED = (
    COMMON
    + """
from huggingface_hub import HfApi

pipe = classes()
expected = drawn(pipe, "dog")
pipe.unet = torch.compile(pipe.unet)
pipe.push_to_hub("tester/compiled", "a message", variant="ema")
print(drawn(load_pipeline("tester/compiled", variant="ema"), "dog") == expected)
card = open(HfApi().hf_hub_download("tester/compiled", "README.md")).read()
print('from_pretrained("tester/compiled", variant="ema")' in card)
for card in {"samples": 3}, {"metrics": [1]}:
    try:
        pipe.push_to_hub("tester/refused", card=card)
    except AttributeError as error:
        print(HfApi().repo_exists("tester/refused"))
"""
)


def test_a_compiled_model_and_a_variant_are_pushed_and_a_bad_fact_leaves_no_repository(hub):
    assert hub(COMPILED).stdout.splitlines() == ["True", "True", "False", "False"]


WITH_LOADERS = (
    COMMON
    + """
classes().push_to_hub("tester/classes", loader_files=True)
push_to_hub(stock(), "tester/stock", loader_files=True)
unet().push_to_hub("tester/unet", loader_files=True)
"""
)

TRUST = """
import sys
if sys.argv[1] == "without the package":
    sys.modules["scalelong_diffusers"] = None  # as it is where it is not installed
from diffusers import AutoModel, DiffusionPipeline

for load, name in (DiffusionPipeline, "classes"), (DiffusionPipeline, "stock"), (AutoModel, "unet"):
    try:
        print(type(load.from_pretrained(f"tester/{name}", trust_remote_code=True)).__name__)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_loader_files_load_with_trust_and_say_what_to_install(hub):
    hub(WITH_LOADERS)
    printed = hub(TRUST, "with the package").stdout.splitlines()
    assert printed == ["ScaleLongClassConditionalPipeline", "DDIMPipeline", "ScaleLongUNet2DModel"]
    printed = hub(TRUST, "without the package", home="new").stdout.splitlines()
    assert (
        printed
        == ["ImportError this model needs the package scalelong-diffusers: pip install scalelong-diffusers"] * 3
    )


ERRORS = (
    COMMON
    + """
import logging, subprocess, sys
from huggingface_hub import hf_hub_download
logging.basicConfig(level=logging.DEBUG)
diffusers.utils.logging.set_verbosity_debug()


def attempt(name, function):
    try:
        function()
    except (ValueError, OSError) as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: no error")


pipe = classes()
owner, reader = sys.argv[1:]
pipe.push_to_hub("tester/private", private=True, token=owner)
pipe.push_to_hub("tester/public", token=owner)
attempt("missing", lambda: load_pipeline("tester/nothing"))
attempt("private", lambda: load_pipeline("tester/private", token=reader))
attempt("private without a token", lambda: load_pipeline("tester/private", token=False))
attempt("revision", lambda: load_pipeline("tester/public", revision="v9"))
attempt("no pipeline", lambda: load_pipeline("tester/unet"))
attempt("forbidden", lambda: pipe.push_to_hub("tester/public", token=reader))
attempt("wrong token", lambda: pipe.push_to_hub("tester/public", token="hf_wrong"))
attempt("id", lambda: pipe.push_to_hub("a/b/c"))
attempt("branch and pull request", lambda: pipe.push_to_hub("tester/public", revision="x", create_pr=True))
attempt("fact", lambda: pipe.push_to_hub("tester/public", card={"datas": "x"}))
load_pipeline("tester/public")
weights = hf_hub_download("tester/public", "unet/diffusion_pytorch_model.safetensors")
content = open(weights, "rb").read()
open(weights, "wb").write(content[:5000])
attempt("damaged", lambda: load_pipeline("tester/public"))
command = [f"{sys.prefix}/bin/hf", "cache", "rm", "--yes", "model/tester/public"]
subprocess.run(command, check=True, capture_output=True)
attempt("again", lambda: load_pipeline("tester/public"))
"""
)


def test_what_goes_wrong_is_said_in_one_sentence_without_a_token(hub):
    result = hub(ERRORS, hub.owner_token, hub.reader_token)
    said = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    not_there = "is neither a local folder nor a repository on the Hub that you may read; for a private one log in"
    for name, message in {
        "missing": f"tester/nothing {not_there}",
        "private": f"tester/private {not_there}",
        "private without a token": f"tester/private {not_there}",
        "revision": "tester/public has no branch, tag or commit 'v9'",
        "no pipeline": "tester/unet is neither",
        "forbidden": "the Hub refused the request for tester/public with status 403; your token (`hf auth whoami`)",
        "wrong token": "the Hub refused the request for tester/public with status",
        "id": "a/b/c is neither a local folder nor a repository on the Hub, whose ids are like user/name",
        "branch and pull request": "a pull request is opened against main: give create_pr or revision='x', not both",
        "fact": "unknown card field 'datas'",
        "damaged": "the weights in tester/public are damaged, or were not downloaded to their end",
        "again": "no error",
    }.items():
        assert said[name].startswith(message), name
    assert said["damaged"].endswith("load again after `hf cache rm model/tester/public`")
    for token in (hub.owner_token, hub.reader_token, "hf_wrong"):
        assert token not in result.stdout
        assert token not in result.stderr


UNREACHABLE = (
    COMMON
    + """
import time
time.sleep = lambda seconds: None  # the client tries six times

for attempt in (lambda: load_pipeline("tester/x"), lambda: classes().push_to_hub("tester/x")):
    try:
        attempt()
    except OSError as error:
        print(error)
"""
)


def test_a_hub_that_does_not_answer(hub):
    printed = hub(UNREACHABLE, HF_ENDPOINT="http://127.0.0.1:9").stdout.splitlines()
    assert printed[0] == "tester/x is no local folder, and the Hub can not be reached to look for it"
    assert printed[1].startswith("the Hub can not be reached for tester/x: ")
    assert len(printed) == 2


@pytest.mark.parametrize("kind", ["ScaleLongUNet2DModel", "ScaleLongClassConditionalPipeline"])
def test_diffusers_still_uploads_through_the_method_that_is_overridden(kind):
    """The one thing of diffusers here that is not public: `save_pretrained(push_to_hub=True)` ends in it."""
    import inspect

    from diffusers.utils import PushToHubMixin

    import scalelong_diffusers

    parameters = list(inspect.signature(PushToHubMixin._upload_folder).parameters)
    assert parameters[:4] == ["self", "working_dir", "repo_id", "token"]
    assert getattr(scalelong_diffusers, kind)._upload_folder is not PushToHubMixin._upload_folder
