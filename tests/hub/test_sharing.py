"""Sharing on the Hub: the real client in separate processes, against a Hub on loopback."""

import inspect
import json

import pytest
from diffusers.utils import PushToHubMixin

import scalelong_diffusers
from scalelong_diffusers import UserError, push_adapter, push_to_hub
from scalelong_diffusers.training.fine_tuning import prepare_for_fine_tuning


@pytest.fixture
def run(hub, project_root):
    """`run(names, *args, **options)` runs scripts of this folder in one process. Return their results and output."""

    def start(names, *args, **options):
        folder = project_root / "tests" / "hub"
        lines = ["import runpy, sys", f"sys.path.insert(0, {str(folder)!r})"]
        lines += [f"runpy.run_path({str(folder / name)!r})" for name in names]
        result = hub("\n".join(lines), *args, check=False, **options)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr

    return start


def test_pushing_offline_is_refused_in_one_line(build_kind):
    with pytest.raises(UserError, match=r"^the Hub cannot be reached for user/model: .*offline mode is enabled"):
        push_to_hub(build_kind("sd1").unet, "user/model")


@pytest.mark.slow
def test_pushed_files_load_elsewhere_and_from_the_cache(run, hub, build_kind, tiny_clip, tmp_path):
    build_kind("sd1").save_pretrained(tmp_path / "base")
    for part in tiny_clip:
        part.save_pretrained(tmp_path / "clip")
    use_older_tokenizer_files(tmp_path / "clip")

    pushed, push_log = run(["push_script.py"], hub.reader_token)
    snippets = {name: pushed["cards"][name] for name in ("stock", "classes", "unet")}
    (tmp_path / "cards.json").write_text(json.dumps(snippets))
    loaded, load_log = run(["snippets_script.py", "load_script.py"], "online", hub.reader_token, home="elsewhere")
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    cached, _ = run(["load_script.py"], "offline", home="elsewhere", **offline)

    check_push(pushed)
    for found in (loaded, cached):
        assert found["images"] == pushed["images"]
        assert found["classes"] == ["ScaleLongClassConditionalPipeline", "DDIMPipeline"]
        assert found["unet"] == pushed["images"][-1]
        assert found["subfolder"]
        assert found["compiled"]
        assert len(found["ids"]) == 5
        assert found["adapters"] == pushed["adapters"]
    assert loaded["private"] == [True, False]
    assert all((tmp_path / f"{name}.png").is_file() for name in ("stock", "classes"))
    check_cards(pushed["cards"])
    check_adapter_cards(pushed["cards"])
    check_errors(pushed["errors"] | loaded["errors"])
    check_unreachable(cached["errors"])
    for token in (hub.owner_token, hub.reader_token, "hf_wrong"):
        assert token not in push_log
        assert token not in load_log


def use_older_tokenizer_files(folder):
    """Replace tokenizer.json by vocab.json and merges.txt."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))


def check_push(pushed):
    assert all("/commit/" in url for url in pushed["urls"])
    assert len(set(pushed["images"])) == 4
    assert len(set(pushed["adapters"])) == 2
    assert pushed["samples"] == [32, 32]
    assert [error.split(":")[0] for error in pushed["bad facts"]] == ["AttributeError"] * 2
    assert not pushed["repository for bad facts"]


def check_cards(cards):
    for card in cards.values():
        assert "pip install -e ." in card
        assert "hf_owner" not in card
    assert cards["edited"].endswith("<!-- scalelong: end -->\n\nWritten by hand.\n")
    assert "| FID-10k | 11.0 |" in cards["edited"]
    assert "12.5" not in cards["edited"]
    assert "![samples](samples.png)" in cards["edited"]
    assert "automatically generated" not in cards["saved"], "diffusers' own card"
    assert 'from_pretrained("tester/compiled", variant="ema")' in cards["compiled"]


def check_adapter_cards(cards):
    for line in (
        "base_model: tester/base",
        "base_model_relation: adapter",
        "pipeline_tag: text-to-image",
        "An adapter for [tester/base](https://huggingface.co/tester/base)",
        "`pip install peft`",
        "from diffusers import StableDiffusionPipeline",
        "from scalelong_diffusers import load_adapter",
        'pipe = StableDiffusionPipeline.from_pretrained("tester/base")',
        'load_adapter(pipe, "tester/adapter", revision="other")',
        "learnable scaling (LS)",
        "| data | shapes |",
    ):
        assert line in cards["adapter"], line
    assert 'load_adapter(pipe, "tester/adapter")\n' in cards["adapter in a pull request"]
    assert "What I found out." in cards["adapter in a pull request"]


def check_errors(errors):
    unknown = "is neither a local folder nor a Hub repository that you can read; for a private one log in with"
    for name, message in {
        "missing": f"tester/nothing {unknown}",
        "private": f"tester/private {unknown}",
        "private without a token": f"tester/private {unknown}",
        "revision": "tester/saved has no branch, tag or commit 'v9'",
        "a model": "tester/unet is not a pipeline: it has no model_index.json",
        "forbidden": "the Hub refused the request for tester/saved with status 403; your token (`hf auth whoami`)",
        "wrong token": "the Hub refused the request for tester/saved with status",
        "id": "a/b/c is neither a local folder nor a Hub repository, whose ids look like user/name",
        "adapter revision": "tester/adapter has no branch, tag or commit 'nowhere'",
        "missing adapter": f"tester/none {unknown}",
        "not an adapter": "tester/base is not an adapter: it has no skip_scaling.json",
        "damaged": "the weights in tester/saved are damaged or incompletely downloaded",
    }.items():
        assert errors[name].startswith(f"UserError: {message}"), name
    assert errors["branch and pull request"].startswith("ValueError: Cannot use `create_pr=True` with `revision='x'`")
    assert errors["fact"].endswith("got an unexpected keyword argument 'datas'")
    assert errors["damaged"].endswith("load again after `hf cache rm model/tester/saved`")
    assert errors["again"] == "no error"


def check_unreachable(errors):
    assert errors["load"].startswith("HubUnreachable: tester/x is not a local folder, and the Hub cannot be reached")
    assert errors["push"].startswith("HubUnreachable: the Hub cannot be reached for tester/x: ")


@pytest.mark.parametrize("is_saved", [True, False])
def test_an_adapter_needs_a_base_model_on_the_hub(build_kind, is_saved, tmp_path):
    pipe = build_kind("sd1")
    if is_saved:
        pipe.save_pretrained(tmp_path)
        pipe = type(pipe).from_pretrained(tmp_path)
    prepare_for_fine_tuning(pipe, "cs", lora_rank=2)
    source = tmp_path if is_saved else "no repository"
    with pytest.raises(UserError, match=f"pass base_model, the repository of .* was loaded from {source}"):
        push_adapter(pipe, "user/adapter")


def test_a_base_model_must_be_a_repository(build_kind):
    pipe = build_kind("sd1")
    with pytest.raises(UserError, match=r"^base_model must be a Hub repository, .* got '\[a\]\(b\) <c>'$"):
        push_adapter(pipe, "user/adapter", base_model="[a](b) <c>")


def test_diffusers_still_uploads_through_the_method_that_we_override():
    """`save_pretrained(push_to_hub=True)` of diffusers ends in this private method."""
    parameters = list(inspect.signature(PushToHubMixin._upload_folder).parameters)
    assert parameters[:4] == ["self", "working_dir", "repo_id", "token"]
    for name in ("ScaleLongUNet2DModel", "ScaleLongClassConditionalPipeline"):
        assert getattr(scalelong_diffusers, name)._upload_folder is not PushToHubMixin._upload_folder
