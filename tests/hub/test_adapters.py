"""Adapters: round trips, the files that diffusers reads, and loads that fail without changing the pipeline."""

import json
import shutil

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scalelong_diffusers import (
    ScaleLongTextToImagePipeline,
    UserError,
    UViTModel,
    apply_skip_scaling,
    load_adapter,
    remove_skip_scaling,
    save_adapter,
)
from scalelong_diffusers.training.fine_tuning import prepare_for_fine_tuning


LORA, GATES, SCALING = "pytorch_lora_weights.safetensors", "skip_scaling.safetensors", "skip_scaling.json"
# peft warns about a second LoRA, which is intended here.
SEVERAL = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
LS = {"method": "ls", "reduction": 4, "shared": True, "init": "identity"}


@torch.no_grad()
def learn(pipe):
    """Set LoRA and gates to values far from their initial ones."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in pipe.unet.named_parameters():
        if ".lora_" in name or name.startswith("skip_scaler."):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)


@pytest.fixture
def fine_tuned(build_kind):
    def build(kind="sd1", scaling=LS, strength=None):
        pipe = build_kind(kind)
        # alpha differs from the rank, so that a LoRA saved without its alpha would be loaded with another factor.
        prepare_for_fine_tuning(pipe, scaling, lora_rank=2, lora_alpha=6)
        learn(pipe)
        return pipe

    return build


@pytest.fixture
def snapshot(draw):
    """Return everything that a failed load could change."""

    def take(pipe):
        unet = pipe.unet
        weights = {name: weight.clone() for name, weight in unet.state_dict().items()}
        trainable = {name for name, p in unet.named_parameters() if p.requires_grad}
        return type(unet), dict(unet.config), dict(pipe.config), weights, trainable, draw(pipe)

    return take


def assert_same(one, other):
    (*one, weights, trainable, images), (*other, other_weights, other_trainable, other_images) = one, other
    assert one == other
    assert trainable == other_trainable
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert torch.equal(images, other_images)


class TestRoundTrip:
    @pytest.mark.parametrize("scaling", [LS, LS | {"shared": False}, "learnable", "cs"], ids=str)
    def test_the_base_gives_the_images_of_the_fine_tuned_pipeline(
        self, build_kind, fine_tuned, kind, scaling, draw, tmp_path
    ):
        trained = fine_tuned(kind, scaling)
        base = build_kind(kind)
        before = draw(base)
        save_adapter(trained, tmp_path)
        assert load_adapter(base, tmp_path) is base
        expected = draw(trained)
        assert torch.equal(draw(base), expected)
        assert not torch.allclose(expected, before, atol=1e-3)
        assert base.unet.config.skip_scaling == trained.unet.config.skip_scaling
        assert base.config["unet"] == ("scalelong_diffusers", "ScaleLongUNet2DConditionModel")

    def test_can_be_removed(self, build_kind, fine_tuned, draw, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        pipe = build_kind("sd1")
        before = draw(pipe)
        load_adapter(pipe, tmp_path)
        pipe.unload_lora_weights()
        remove_skip_scaling(pipe)
        assert torch.equal(draw(pipe), before)
        assert type(pipe.unet).__name__ == "UNet2DConditionModel"

    def test_saving_a_loaded_adapter_gives_the_same_files(self, build_kind, fine_tuned, tmp_path):
        save_adapter(fine_tuned(), tmp_path / "one")
        save_adapter(load_adapter(build_kind("sd1"), tmp_path / "one").unet, tmp_path / "two")
        for name in (SCALING, GATES):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        one, two = (load_file(tmp_path / folder / LORA) for folder in ("one", "two"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_gates_without_lora(self, build_kind, draw, tmp_path):
        trained = apply_skip_scaling(build_kind("sd1"), LS)
        learn(trained)
        save_adapter(trained, tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {SCALING, GATES}
        assert torch.equal(draw(load_adapter(build_kind("sd1"), tmp_path)), draw(trained))

    def test_loads_into_a_base_with_the_same_scaling(self, build_kind, draw, tmp_path):
        base = apply_skip_scaling(build_kind("sd1"), "cs")
        base.save_pretrained(tmp_path / "base")
        prepare_for_fine_tuning(base, "cs", lora_rank=2)
        learn(base)
        save_adapter(base, tmp_path / "adapter")
        again = StableDiffusionPipeline.from_pretrained(tmp_path / "base")
        assert torch.equal(draw(load_adapter(again, tmp_path / "adapter")), draw(base))

    def test_uvit_in_our_pipeline(self, tiny_clip, draw, tmp_path):
        def build():
            torch.manual_seed(0)
            unet = UViTModel(
                sample_size=8,
                hidden_size=32,
                num_layers=2,
                num_attention_heads=2,
                cross_attention_dim=16,
                context_length=12,
                skip_scaling=LS,
            )
            return ScaleLongTextToImagePipeline(unet.eval(), DDIMScheduler(), *tiny_clip)

        trained = build()
        prepare_for_fine_tuning(trained, LS, lora_rank=2)
        learn(trained)
        save_adapter(trained, tmp_path)
        base = build()
        base.set_progress_bar_config(disable=True)
        trained.set_progress_bar_config(disable=True)
        assert torch.equal(draw(load_adapter(base, tmp_path)), draw(trained))


class TestFiles:
    def test_diffusers_reads_the_lora_with_its_alpha(self, build_kind, fine_tuned, draw, tmp_path):
        trained = fine_tuned(scaling="cs")  # with strength 0, so that only the LoRA counts
        save_adapter(trained, tmp_path)
        pipe = build_kind("sd1")
        pipe.load_lora_weights(tmp_path)
        assert torch.equal(draw(pipe), draw(trained))

    def test_file_format(self, fine_tuned, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {LORA, SCALING, GATES}
        entry = {"version": 1, "method": "ls", "shared": True, "reduction": 4, "activation": "relu", "gate": "se"}
        entry |= {"gate_axis": "channels", "init": "identity", "strength": 1.0}
        assert json.loads((tmp_path / SCALING).read_text()) == {
            "skip_scaling": entry,
            "num_lora_weights": len(load_file(tmp_path / LORA)),
        }
        layers = [f"skip_scaler.gates.width_{w}.{n}" for w in (16, 32) for n in ("squeeze", "excite")]
        assert load_file(tmp_path / GATES).keys() == {f"{layer}.{n}" for layer in layers for n in ("weight", "bias")}
        first = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight"
        assert first in load_file(tmp_path / LORA)

    def test_overwrites_an_older_adapter(self, build_kind, fine_tuned, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        save_adapter(apply_skip_scaling(build_kind("sd1"), "cs"), tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {SCALING}

    @SEVERAL
    def test_saves_one_of_several_loras(self, build_kind, fine_tuned, draw, tmp_path):
        save_adapter(fine_tuned(), tmp_path / "one")
        pipe = load_adapter(build_kind("sd1"), tmp_path / "one", adapter_name="first")
        pipe.load_lora_weights(tmp_path / "one", adapter_name="second")
        with pytest.raises(
            UserError, match=r"adapter_name must be one of the LoRAs of the model, \['first', 'second'\], got None"
        ):
            save_adapter(pipe, tmp_path / "two")
        save_adapter(pipe, tmp_path / "two", adapter_name="second")
        assert torch.equal(draw(load_adapter(build_kind("sd1"), tmp_path / "two")), draw(fine_tuned()))

    def test_rejects_a_name_without_a_lora(self, build_kind, tmp_path):
        with pytest.raises(UserError, match=r"adapter_name must be one of the LoRAs of the model, \[\], got 'first'"):
            save_adapter(apply_skip_scaling(build_kind("sd1"), "cs"), tmp_path, adapter_name="first")

    def test_rejects_a_model_without_scaling(self, build_kind, tmp_path):
        with pytest.raises(UserError, match="this UNet2DConditionModel has no skip scaling to save"):
            save_adapter(build_kind("sd1"), tmp_path)


def rewrite(file, change):
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(change(load_file(file)), file, metadata)


class TestAFailedLoadChangesNothing:
    """Bases in all states, and adapters with all faults."""

    BASES = {
        "plain": lambda pipe: pipe,
        "with no scaling": lambda pipe: apply_skip_scaling(pipe, "none"),
        "same scaling": lambda pipe: (apply_skip_scaling(pipe, LS), learn(pipe))[0],
    }
    FAULTS = {
        "missing gates": (
            lambda folder: (folder / GATES).unlink(),
            "width_16.excite.bias is missing in the adapter and .16,. in the model",
        ),
        "one gate missing": (
            lambda folder: rewrite(folder / GATES, lambda gates: dict(sorted(gates.items())[1:])),
            "width_16.excite.bias is missing in the adapter and .16,. in the model",
        ),
        "gates of another shape": (
            lambda folder: rewrite(folder / GATES, lambda gates: {name: torch.ones(3, 3) for name in gates}),
            r"does not fit this .*excite.bias is \(3, 3\) in the adapter and \(16,\) in the model",
        ),
        "missing LoRA": (
            lambda folder: (folder / LORA).unlink(),
            rf"{LORA} must hold the \d+ LoRA weights that save_adapter wrote, but holds 0",
        ),
        "a LoRA without weights": (
            lambda folder: rewrite(folder / LORA, lambda lora: {}),
            rf"{LORA} must hold the \d+ LoRA weights that save_adapter wrote, but holds 0",
        ),
        "one LoRA weight missing": (
            lambda folder: rewrite(folder / LORA, lambda lora: dict(sorted(lora.items())[1:])),
            rf"{LORA} must hold the \d+ LoRA weights that save_adapter wrote, but holds \d+",
        ),
        "an unknown layer": (
            lambda folder: rewrite(folder / LORA, lambda lora: {n.replace("attn1", "x"): w for n, w in lora.items()}),
            r"its LoRA adapts .*\.x\.to_., which the model does not have",
        ),
        "a layer of another width": (
            lambda folder: rewrite(folder / LORA, lambda lora: {name: torch.ones(2, 2) for name in lora}),
            "size mismatch",
        ),
        "damaged gates": (
            lambda folder: (folder / GATES).write_bytes(b"12345678123"),
            "the weights in .* are damaged or incompletely downloaded",
        ),
        "a damaged LoRA": (
            lambda folder: (folder / LORA).write_bytes(b"12345678123"),
            "the weights in .* are damaged or incompletely downloaded",
        ),
        "a LoRA that only peft rejects": (
            lambda folder: save_file(
                load_file(folder / LORA), folder / LORA, {"lora_adapter_metadata": '{"unet.r": 2, "unet.bogus": 1}'}
            ),
            "`LoraConfig` class could not be instantiated",
        ),
        "a LoRA that fails in the middle": (
            lambda folder: rewrite(
                folder / LORA,
                lambda lora: {n: torch.ones(3, *w.shape[1:]) if "lora_A" in n else w for n, w in lora.items()},
            ),
            "mismatch",
        ),
        "a newer format": (
            lambda folder: (folder / SCALING).write_text('{"skip_scaling": {"version": 9, "method": "xs"}}'),
            "format version 9.*upgrade scalelong-diffusers",
        ),
        "another JSON": (
            lambda folder: (folder / SCALING).write_text("{}"),
            "it has no skip_scaling.json with an entry skip_scaling",
        ),
    }

    # After the pipeline was changed.
    LATE = ("a LoRA that only peft rejects", "a LoRA that fails in the middle", "a layer of another width")

    @pytest.mark.parametrize("base", BASES)
    def test_for_every_base_and_fault(self, build_kind, fine_tuned, snapshot, base, tmp_path):
        save_adapter(fine_tuned(), tmp_path / "intact")
        pipe = self.BASES[base](build_kind("sd1"))
        before = snapshot(pipe)
        for number, (fault, (damage, message)) in enumerate(self.FAULTS.items()):
            folder = shutil.copytree(tmp_path / "intact", tmp_path / str(number))
            damage(folder)
            with pytest.raises(UserError, match=message):
                load_adapter(pipe, folder)
            if fault in self.LATE:
                assert_same(snapshot(pipe), before)
        assert_same(snapshot(pipe), before)

    @SEVERAL
    @pytest.mark.filterwarnings("ignore:Adapter other was active which is now deleted")
    def test_next_to_another_lora(self, build_kind, fine_tuned, snapshot, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        pipe = load_adapter(build_kind("sd1"), tmp_path, adapter_name="mine")
        before = snapshot(pipe)
        with pytest.raises(ValueError, match="Adapter name mine already in use"):
            load_adapter(pipe, tmp_path, adapter_name="mine")
        self.FAULTS["a LoRA that fails in the middle"][0](tmp_path)
        with pytest.raises(UserError, match=f"{LORA} cannot be loaded: RuntimeError: .* size mismatch"):
            load_adapter(pipe, tmp_path, adapter_name="other")
        assert_same(snapshot(pipe), before)
        assert pipe.get_list_adapters() == {"unet": ["mine"]}


class TestWrongBase:
    def test_rejects_another_width(self, build_kind, fine_tuned, sd, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        pipe = build_kind("sd1")
        pipe.unet = sd.build(block_out_channels=(24, 48))
        with pytest.raises(
            UserError, match=r"does not fit this .*width_16.* is \(16,\) in the adapter and missing in the model"
        ):
            load_adapter(pipe, tmp_path)

    def test_rejects_another_architecture(self, build_kind, fine_tuned, tmp_path):
        save_adapter(fine_tuned("sdxl", "cs"), tmp_path)
        with pytest.raises(
            UserError, match=r"it belongs to another base model: its LoRA adapts .*, which the model does not have"
        ):
            load_adapter(build_kind("sd1"), tmp_path)

    def test_rejects_a_base_without_attention(self, build_kind, fine_tuned, sd, tmp_path):
        save_adapter(fine_tuned(scaling="cs"), tmp_path)
        pipe = build_kind("sd1")
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        pipe.unet = sd.build(**blocks, mid_block_type=None)
        with pytest.raises(UserError, match=r"adapts down_blocks.*, which the model does not have"):
            load_adapter(pipe, tmp_path)

    def test_rejects_another_scaling(self, build_kind, fine_tuned, snapshot, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        pipe = apply_skip_scaling(build_kind("sd1"), "cs")
        before = snapshot(pipe)
        with pytest.raises(UserError, match=r"already has the scaling .*'cs'.*, but .* has .*'ls'"):
            load_adapter(pipe, tmp_path)
        assert_same(snapshot(pipe), before)


class TestNotAnAdapter:
    def test_rejects_an_empty_folder(self, build_kind, tmp_path):
        with pytest.raises(
            UserError, match=r"is not an adapter: it has no skip_scaling.json with an entry .* save_adapter writes"
        ):
            load_adapter(build_kind("sd1"), tmp_path)

    def test_an_adapter_of_an_earlier_version_has_no_number(self, build_kind, fine_tuned, draw, tmp_path):
        trained = fine_tuned()
        save_adapter(trained, tmp_path)
        content = json.loads((tmp_path / SCALING).read_text())
        del content["num_lora_weights"]
        (tmp_path / SCALING).write_text(json.dumps(content))
        assert torch.equal(draw(load_adapter(build_kind("sd1"), tmp_path)), draw(trained))

    def test_rejects_a_lora_without_scaling(self, build_kind, fine_tuned, tmp_path):
        save_adapter(fine_tuned(), tmp_path)
        (tmp_path / SCALING).unlink()
        with pytest.raises(UserError, match=r"load a LoRA without skip scaling with pipe.load_lora_weights"):
            load_adapter(build_kind("sd1"), tmp_path)

    def test_needs_the_hub_for_an_id(self, build_kind):
        with pytest.raises(UserError, match="some/adapter is not a local folder, and the Hub cannot be reached"):
            load_adapter(build_kind("sd1"), "some/adapter")
