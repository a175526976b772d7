"""Loading never uses missing weights, never runs code in the files, and never reads files outside the folder."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextModel,
    CLIPTokenizer,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from scalelong_diffusers import ScaleLongTextToImagePipeline, UserError, load_pipeline
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder
from scalelong_diffusers.training.models import load_vae
from scalelong_diffusers.training.stable_diffusion import load_stable_diffusion


DIFFUSERS_WEIGHTS = "diffusion_pytorch_model.safetensors"
WEIGHTS = {
    "text_encoder": "text_encoder/model.safetensors",
    "unet": f"unet/{DIFFUSERS_WEIGHTS}",
    "vae": f"vae/{DIFFUSERS_WEIGHTS}",
}
# A config entry that adds layers without changing the shapes of others.
MORE_LAYERS = {
    "text_encoder": {"num_hidden_layers": 4},
    "unet": {"transformer_layers_per_block": 2},
    "vae": {"layers_per_block": 3},
}
BROKEN_JSON = {"list": "[]", "null": "null", "number": "5", "nested": "[" * 10_000 + "]" * 10_000}


@pytest.fixture
def folder(tiny_stable_diffusion, tmp_path):
    """A Stable Diffusion."""
    tiny_stable_diffusion.save_pretrained(tmp_path / "sd")
    return tmp_path / "sd"


def change_json(file: Path, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def lose_weights(folder: Path, component: str, how: str):
    if how == "unrelated":
        save_file({"unrelated": torch.zeros(1)}, folder / WEIGHTS[component], {"format": "pt"})
    elif how == "one":
        weights = load_file(folder / WEIGHTS[component])
        weights.pop(max(weights))
        save_file(weights, folder / WEIGHTS[component], {"format": "pt"})
    else:
        change_json(folder / component / "config.json", **MORE_LAYERS[component])


@pytest.mark.parametrize("how", ["unrelated", "one", "more layers"])
@pytest.mark.parametrize("component", sorted(WEIGHTS))
class TestMissingWeights:
    def check(self, load, source, component):
        message = rf"the {component} of .* lacks \d+ weights that a \w+ with its config has, for example \w+\.\w+"
        with pytest.raises(UserError, match=message):
            load(source)

    def test_of_a_pipeline(self, folder, component, how):
        lose_weights(folder, component, how)
        for load in (load_pipeline, ScaleLongTextToImagePipeline.from_pretrained, load_stable_diffusion):
            self.check(load, folder, component)

    def test_of_a_scaled_pipeline(self, folder, component, how):
        load_pipeline(folder).save_pretrained(folder.with_name("scaled"))
        lose_weights(folder.with_name("scaled"), component, how)
        self.check(load_pipeline, folder.with_name("scaled"), component)

    def test_on_the_command_line(self, folder, component, how, scalelong, tmp_path):
        lose_weights(folder, component, how)
        flags = ("--prompt", "a", "--output_dir", tmp_path / "out", "--num_inference_steps", 1)
        code, _, shown = scalelong("sample", folder, *flags)
        assert code == 2
        assert f"the {component} of {folder} lacks" in shown
        assert "REPORT" not in shown
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["unrelated", "one", "more layers"])
def test_rejects_a_text_encoder_that_lacks_weights(folder, how):
    lose_weights(folder, "text_encoder", how)
    with pytest.raises(UserError, match=r"weights of the text encoder in .* is missing or has another shape"):
        load_text_encoder(folder)


def test_a_component_that_is_passed_is_not_checked(folder, tiny_clip):
    lose_weights(folder, "text_encoder", "one")
    assert load_pipeline(folder, text_encoder=tiny_clip[0]).text_encoder is tiny_clip[0]


def test_the_weights_of_a_variant_are_checked(folder):
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.unet.save_pretrained(folder / "unet", variant="fp16")
    pipe.text_encoder.save_pretrained(folder / "text_encoder", variant="fp16")
    lose_weights(folder, "unet", "one")
    assert load_pipeline(folder, variant="fp16").unet.dtype == torch.float32, "the vae has no variant"
    (folder / WEIGHTS["text_encoder"]).rename(folder / "text_encoder" / "model.fp16.safetensors")
    save_file({"unrelated": torch.zeros(1)}, folder / "text_encoder" / "model.fp16.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"the text_encoder of .* lacks"):
        load_pipeline(folder, variant="fp16")


def test_rejects_an_autoencoder_that_lacks_weights(folder):
    lose_weights(folder, "vae", "one")
    with pytest.raises(UserError, match=r"the vae .* lacks 1 weights that a AutoencoderKL with"):
        load_vae(str(folder / "vae"), torch.device("cpu"))


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that exists if the code of a folder was run. A question whether to run it is answered with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "was run"


def add_code(folder: Path, marker: Path):
    folder.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")


class TestCodeIsNotRun:
    MESSAGE = "needs code that it contains, and such code is never run"

    @pytest.mark.parametrize("load", [load_pipeline, load_stable_diffusion])
    def test_of_a_pipeline(self, folder, marker, load):
        add_code(folder, marker)
        change_json(folder / "model_index.json", _class_name=["evil", "StableDiffusionPipeline"])
        with pytest.raises(UserError, match=self.MESSAGE):
            load(folder)
        assert not marker.exists()

    @pytest.mark.parametrize("load", [load_pipeline, load_stable_diffusion])
    def test_of_a_component(self, folder, marker, load):
        add_code(folder / "vae", marker)
        change_json(folder / "model_index.json", vae=["evil", "Evil"])
        with pytest.raises(UserError, match=self.MESSAGE):
            load(folder)
        assert not marker.exists()

    @pytest.mark.parametrize("file", ["text_encoder/config.json", "tokenizer/tokenizer_config.json"])
    @pytest.mark.parametrize("load", [load_pipeline, load_stable_diffusion, load_text_encoder])
    def test_of_a_text_encoder(self, folder, marker, file, load):
        add_code((folder / file).parent, marker)
        names = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
        change_json(folder / file, auto_map=names)
        load(folder)  # as a stock class
        assert not marker.exists()

    def test_of_a_processor_that_loads_a_tokenizer(self, folder, marker):
        add_code(folder / "tokenizer", marker)
        CLIPImageProcessorPil().save_pretrained(folder / "tokenizer")
        names = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
        change_json(folder / "tokenizer" / "tokenizer_config.json", **names)
        change_json(folder / "model_index.json", tokenizer=["transformers", "CLIPProcessor"])
        with pytest.raises(UserError, match=self.MESSAGE):
            load_pipeline(folder)
        assert not marker.exists()

    @pytest.mark.parametrize("name", ["AutoModel", "AutoImageProcessor"])
    def test_of_a_feature_network(self, marker, tmp_path, name, scalelong):
        ViTModel(ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
                           intermediate_size=16)).save_pretrained(tmp_path / "vit")  # fmt: skip
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
        add_code(tmp_path / "vit", marker)
        file, kind, names = {
            "AutoModel": ("config.json", "model_type", {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}),
            "AutoImageProcessor": ("preprocessor_config.json", "image_processor_type", {name: "evil.Evil"}),
        }[name]
        change_json(tmp_path / "vit" / file, auto_map=names, **{kind: "evil"})
        images = tmp_path / "images"
        images.mkdir()
        for k in range(2):
            Image.new("RGB", (8, 8)).save(images / f"{k}.png")
        code, _, shown = scalelong("evaluate", images, "--reference", "shapes", "--features", tmp_path / "vit")
        assert code == 2
        assert self.MESSAGE in shown
        assert not marker.exists()

    def test_every_loader_is_called_without_trust(self, folder, monkeypatch):
        calls = []

        def record(loader, name):
            real = getattr(loader, name)

            def call(*args, **kwargs):
                calls.append((f"{loader.__name__}.{name}", kwargs.get("trust_remote_code")))
                return real(*args, **kwargs)

            monkeypatch.setattr(loader, name, call)

        for loader in (DiffusionPipeline, CLIPTextModel, CLIPTokenizer):
            record(loader, "from_pretrained")
        load_stable_diffusion(folder)
        assert ("DiffusionPipeline.from_pretrained", False) in calls
        calls.clear()
        load_text_encoder(folder)
        assert calls == [("CLIPTextModel.from_pretrained", False), ("CLIPTokenizer.from_pretrained", False)]

    def test_cannot_be_turned_on(self, folder):
        with pytest.raises(TypeError, match="multiple values for keyword argument 'trust_remote_code'"):
            load_pipeline(folder, trust_remote_code=True)


class Evil:
    """A pickle that runs code."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    ("component", "name"), [("vae", "diffusion_pytorch_model"), ("text_encoder", "pytorch_model")]
)
def test_says_why_a_pickle_is_refused(folder, marker, component, name):
    weights = folder / WEIGHTS[component]
    torch.save({**load_file(weights), "evil": Evil(marker)}, weights.with_name(f"{name}.bin"))
    weights.unlink()
    with pytest.raises(UserError, match=r"the weights in .* hold more than tensors, .* a pickle can run code: save"):
        load_pipeline(folder)
    assert not marker.exists()


def test_loads_shards_in_its_folder(folder):
    unet = load_pipeline(folder).unet
    unet.save_pretrained(folder / "unet", max_shard_size="50KB")
    (folder / WEIGHTS["unet"]).unlink(missing_ok=True)
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 1
    again = load_pipeline(folder).unet.state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in unet.state_dict().items())


@pytest.mark.parametrize(("component", "entry"), [("unet", "layers_per_block"), ("text_encoder", "num_hidden_layers")])
def test_rejects_absurdly_deep_models(folder, component, entry):
    change_json(folder / component / "config.json", **{entry: 20_000})
    with pytest.raises(UserError, match=rf"{folder} has a config for more than 10,000 weight tensors, the limit"):
        load_pipeline(folder)


@pytest.mark.parametrize("path", ["../elsewhere.safetensors", "/elsewhere.safetensors", "sub/a.safetensors", "..", 5])
@pytest.mark.parametrize("component", sorted(WEIGHTS))
def test_rejects_shards_in_other_folders(folder, component, path):
    weights = folder / WEIGHTS[component]
    keys = load_file(weights)
    weights.rename(folder / component / "elsewhere.safetensors")
    index = weights.with_name(f"{weights.name}.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, path)}))
    for load in (load_pipeline, load_stable_diffusion):
        with pytest.raises(UserError, match=rf"{index} must name files in its folder, got "):
            load(folder)


@pytest.mark.parametrize("content", BROKEN_JSON.values(), ids=BROKEN_JSON)
@pytest.mark.parametrize(
    "name",
    [
        *("model_index.json", "unet/config.json", "text_encoder/config.json", "vae/config.json"),
        *("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json", "tokenizer/tokenizer.json"),
        *("unet/diffusion_pytorch_model.safetensors.index.json", "text_encoder/model.safetensors.index.json"),
    ],
)
def test_names_json_that_is_not_an_object(folder, name, content):
    (folder / name).write_text(content)
    for load in (load_pipeline, load_stable_diffusion):
        with pytest.raises(UserError, match=rf"{folder / name} (must hold a JSON object, got|is not valid JSON)"):
            load(folder)


@pytest.mark.parametrize("class_name", [[], 5, ["a"], ["a", None], None], ids=str)
def test_names_an_index_without_a_class(folder, class_name):
    change_json(folder / "model_index.json", _class_name=class_name)
    for load in (load_pipeline, load_stable_diffusion):
        with pytest.raises(UserError, match=r"is not a pipeline: it has no model_index\.json with a _class_name"):
            load(folder)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"])
def test_names_a_folder_with_a_damaged_tokenizer(folder, name):
    tokenizer = folder / "tokenizer"
    if name in ("vocab.json", "merges.txt"):
        model = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
        (tokenizer / "tokenizer.json").unlink()
        (tokenizer / "vocab.json").write_text(json.dumps(model["vocab"]))
        (tokenizer / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    content = (tokenizer / name).read_bytes()
    for position in range(1, len(content), len(content) // 20):
        for bit in (1, 128):
            flipped = bytearray(content)
            flipped[position] ^= bit
            (tokenizer / name).write_bytes(flipped)
            for load in (load_text_encoder, load_pipeline):
                with suppress(UserError):  # some damage is harmless
                    load(folder)
