"""Feature networks: their features, their fingerprints, and what is rejected."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from scalelong_diffusers import UserError
from scalelong_diffusers.evaluation import load_features
from scalelong_diffusers.evaluation.networks import INCEPTION_WEIGHTS


@pytest.fixture
def images():
    return torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def saved(model, folder):
    model.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return load_features(str(folder))


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def normalized(images):
    """Normalize images as the processor does."""
    return images.float() / 127.5 - 1


def test_features_are_the_pooled_output(extractor, network, images):
    expected = ViTModel.from_pretrained(network)(normalized(images)).pooler_output
    torch.testing.assert_close(extractor(images), expected, atol=1e-5, rtol=0)
    assert extractor(images).shape == (5, extractor.num_features)
    torch.testing.assert_close(extractor(images[2:3]), extractor(images)[2:3], atol=1e-5, rtol=0)


def test_features_are_the_mean_of_the_tokens_without_a_pooler(images, tmp_path):
    classifier = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **TINY)).eval()
    extractor = saved(classifier, tmp_path / "classifier")
    expected = classifier.vit(normalized(images)).last_hidden_state.mean(1)
    torch.testing.assert_close(extractor(images), expected, atol=1e-5, rtol=0)
    assert load_features(str(tmp_path / "classifier")).fingerprint == extractor.fingerprint


def test_features_of_a_convolutional_network(images, tmp_path):
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=1)).eval()
    extractor = saved(model, tmp_path / "convnext")
    torch.testing.assert_close(extractor(images), model(normalized(images)).pooler_output, atol=1e-5, rtol=0)


def test_features_of_a_model_of_images_and_text(images, tmp_path):
    text = {"vocab_size": 9, **TINY}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4, **TINY}, projection_dim=6)
    ).eval()
    extractor = saved(model, tmp_path / "clip")
    assert extractor.num_features == 6
    expected = model.get_image_features(pixel_values=normalized(images)).pooler_output
    torch.testing.assert_close(extractor(images), expected, atol=1e-5, rtol=0)


def test_fingerprint_depends_on_weights_and_processor_but_not_on_the_folder(
    extractor, network, make_network, tmp_path
):
    same = load_features(str(make_network(tmp_path / "elsewhere")))
    assert same.fingerprint == extractor.fingerprint
    ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=False).save_pretrained(tmp_path / "elsewhere")
    assert load_features(str(tmp_path / "elsewhere")).fingerprint != extractor.fingerprint
    model = ViTModel.from_pretrained(network)
    with torch.no_grad():
        model.layernorm.bias[0] += 1e-3
    assert saved(model, tmp_path / "trained").fingerprint != extractor.fingerprint


class TestRejects:
    def test_missing_image_processor(self, tmp_path):
        ViTModel(ViTConfig(image_size=8, patch_size=4, **TINY)).save_pretrained(tmp_path / "bare")
        with pytest.raises(UserError, match=r"bare cannot be loaded: OSError: Can't load image processor"):
            load_features(str(tmp_path / "bare"))

    def test_text_model(self, tmp_path):
        with pytest.raises(UserError, match="bert has no image features: BertModel fails with"):
            saved(BertModel(BertConfig(vocab_size=9, **TINY)), tmp_path / "bert")

    def test_folder_without_model(self, tmp_path):
        with pytest.raises(UserError, match=f"{tmp_path.name} cannot be loaded"):
            load_features(str(tmp_path))

    def test_missing_weights(self, network, tmp_path):
        model = ViTModel.from_pretrained(network)
        weights = {name: tensor for name, tensor in model.state_dict().items() if "layernorm_after" not in name}
        model.save_pretrained(tmp_path / "less", state_dict=weights)
        ViTImageProcessorPil().save_pretrained(tmp_path / "less")
        with pytest.raises(UserError, match=r"less lacks weights of its ViTModel, such as .*layernorm_after"):
            load_features(str(tmp_path / "less"))

    def test_damaged_weights(self, make_network, tmp_path):
        file = make_network(tmp_path / "cut") / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(UserError, match=r"the weights in .*cut are damaged"):
            load_features(str(tmp_path / "cut"))

    def test_features_that_are_not_finite(self, make_network, tmp_path):
        config = make_network(tmp_path / "nan") / "preprocessor_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "image_mean": [math.nan] * 3}))
        with pytest.raises(UserError, match="nan has no image features: ViTModel gives values that are not finite"):
            load_features(str(tmp_path / "nan"))
        config.write_text(json.dumps({**json.loads(config.read_text()), "rescale_factor": 10**400}))
        with pytest.raises(UserError, match="nan has no image features: ViTModel fails with int too large to convert"):
            load_features(str(tmp_path / "nan"))

    @pytest.mark.parametrize("damage", ["cut", "text", "empty"])
    def test_damaged_torch_weights(self, damage, make_network, tmp_path):
        safetensors = make_network(tmp_path / "old") / "model.safetensors"
        file = safetensors.with_name("pytorch_model.bin")
        # torch reports the end of small and large archives differently.
        torch.save({**load_file(safetensors), "unused": torch.zeros(100_000)}, file)
        safetensors.unlink()
        load_features(str(file.parent))
        file.write_bytes({"cut": file.read_bytes()[:-300], "text": b"not weights", "empty": b""}[damage])
        with pytest.raises(UserError, match=r"the weights in .*old are damaged"):
            load_features(str(file.parent))

    def test_weights_of_another_config(self, make_network, tmp_path):
        config = make_network(tmp_path / "wide") / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
        with pytest.raises(UserError, match=r"weights in .*wide do not fit their config\.json"):
            load_features(str(tmp_path / "wide"))

    @pytest.mark.parametrize("damage", ["cut", "text", "empty", "other weights"])
    def test_damaged_inception_weights(self, damage, monkeypatch, tmp_path):
        def network(*arguments, **options):
            """Load the weights as torch-fidelity does."""
            weights = torch.hub.load_state_dict_from_url(f"https://host/{INCEPTION_WEIGHTS}")
            torch.nn.Linear(2, 2).load_state_dict(weights)

        monkeypatch.setattr("torchmetrics.image.fid.FrechetInceptionDistance", network)
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        file = tmp_path / "hub" / "checkpoints" / INCEPTION_WEIGHTS
        file.parent.mkdir(parents=True)
        torch.save({"some": torch.zeros(2)}, file)
        if damage != "other weights":
            file.write_bytes({"cut": file.read_bytes()[:-300], "text": b"not weights", "empty": b""}[damage])
        with pytest.raises(UserError, match=f"the weights of Inception in .*{INCEPTION_WEIGHTS} are damaged: put "):
            load_features("inception")

    def test_inception_weights_that_cannot_be_downloaded(self, monkeypatch, tmp_path):
        def network(*arguments, **options):
            raise OSError("no network")

        monkeypatch.setattr("torchmetrics.image.fid.FrechetInceptionDistance", network)
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        with pytest.raises(UserError, match=r"the weights of Inception cannot be downloaded \(no network\): put "):
            load_features("inception")
