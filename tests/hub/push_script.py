"""
Push models, pipelines, adapters and cards, and try what the Hub refuses.

    python push_script.py READER_TOKEN        prints the results as JSON

The current folder has a base pipeline and a CLIP.
"""

import sys
from pathlib import Path

import diffusers
import torch
from hub_common import RESULTS, classes, draw, error_of, report, stock, unet
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from PIL import Image

from scalelong_diffusers import push_adapter, push_to_hub
from scalelong_diffusers.training.fine_tuning import prepare_for_fine_tuning


def edit_card(repo_id, text):
    """Append text to a card, as its owner would."""
    card = ModelCard(read_card(repo_id))
    card.text += text
    HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id=repo_id)


def read_card(repo_id, revision=None):
    return Path(hf_hub_download(repo_id, "README.md", revision=revision)).read_text()


RESULTS["urls"] = [
    classes().push_to_hub("tester/classes", private=True, commit_message="first"),
    classes(seed=1).push_to_hub("tester/classes", revision="ema"),
    push_to_hub(classes(seed=2), "tester/classes", create_pr=True),
    unet().push_to_hub("tester/unet"),
    unet(seed=1).push_to_hub("tester/unet", subfolder="other"),
    push_to_hub(stock(), "tester/stock"),
]
classes().save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")
classes().push_to_hub("tester/private", private=True)
RESULTS["images"] = [*(draw(classes(seed), "dog", guidance_scale=2) for seed in range(3)), draw(stock())]

facts = {"training_data": "Fashion-MNIST", "samples": Image.new("RGB", (32, 32), "red")}
classes().push_to_hub("tester/edited", card=facts | {"metrics": {"FID-10k": 12.5}})
edit_card("tester/edited", "\nWritten by hand.\n")
classes(seed=1).push_to_hub("tester/edited", card=facts | {"metrics": {"FID-10k": 11.0}})
RESULTS["samples"] = Image.open(hf_hub_download("tester/edited", "samples.png")).size

pipe = classes()
pipe.unet = torch.compile(pipe.unet, backend="eager")
pipe.push_to_hub("tester/compiled", "a message", variant="ema")
RESULTS["bad facts"] = [
    error_of(lambda: pipe.push_to_hub("tester/bad", card={"samples": 3})),
    error_of(lambda: pipe.push_to_hub("tester/bad", card={"metrics": [1]})),
]
RESULTS["repository for bad facts"] = HfApi().repo_exists("tester/bad")

push_to_hub(diffusers.StableDiffusionPipeline.from_pretrained("base"), "tester/base")
RESULTS["adapters"] = []
for seed, revision in enumerate((None, "other")):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained("tester/base")
    scaling = {"method": "ls", "reduction": 4, "init": "identity"}
    trained = prepare_for_fine_tuning(pipe, scaling, lora_rank=2, lora_alpha=6)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.3)
    push_adapter(pipe, "tester/adapter", revision=revision, card={"training_data": "shapes"})
    RESULTS["adapters"].append(draw(pipe, "a red circle"))
edit_card("tester/adapter", "\nWhat I found out.")
push_adapter(pipe, "tester/adapter", create_pr=True, base_model="tester/base")

HfApi().create_repo("tester/clip")
HfApi().upload_folder(repo_id="tester/clip", folder_path="clip")

RESULTS["cards"] = {name: read_card(f"tester/{name}") for name in ("classes", "unet", "stock", "saved", "edited")}
RESULTS["cards"]["compiled"] = read_card("tester/compiled")
RESULTS["cards"]["adapter"] = read_card("tester/adapter", "other")
RESULTS["cards"]["adapter in a pull request"] = read_card("tester/adapter", "refs/pr/1")

reader = sys.argv[1]
RESULTS["errors"] = {
    "forbidden": error_of(lambda: classes().push_to_hub("tester/saved", token=reader)),
    "wrong token": error_of(lambda: classes().push_to_hub("tester/saved", token="hf_wrong")),
    "id": error_of(lambda: classes().push_to_hub("a/b/c")),
    "branch and pull request": error_of(lambda: push_to_hub(stock(), "tester/stock", revision="x", create_pr=True)),
    "fact": error_of(lambda: classes().push_to_hub("tester/saved", card={"datas": "x"})),
}
report()
