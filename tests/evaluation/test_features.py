"""Features are those of the model, whatever the batch; and a fingerprint tells networks apart."""

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


def by_hand(images):
    """What the processor makes of images of its own size."""
    return images.float() / 127.5 - 1


def test_they_are_the_pooled_output(features, network, images):
    expected = ViTModel.from_pretrained(network)(by_hand(images)).pooler_output
    torch.testing.assert_close(features(images), expected, atol=1e-5, rtol=0)
    assert features(images).shape == (5, features.num_features)
    torch.testing.assert_close(features(images[2:3]), features(images)[2:3], atol=1e-5, rtol=0)


def test_without_weights_of_a_pooler_they_are_the_mean_of_the_tokens(images, tmp_path):
    classifier = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **TINY)).eval()
    features = saved(classifier, tmp_path / "classifier")
    expected = classifier.vit(by_hand(images)).last_hidden_state.mean(1)
    torch.testing.assert_close(features(images), expected, atol=1e-5, rtol=0)
    assert load_features(str(tmp_path / "classifier")).fingerprint == features.fingerprint


def test_of_a_convolutional_network(images, tmp_path):
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=1)).eval()
    features = saved(model, tmp_path / "convnext")
    torch.testing.assert_close(features(images), model(by_hand(images)).pooler_output, atol=1e-5, rtol=0)


def test_of_a_model_of_images_and_text(images, tmp_path):
    text = {"vocab_size": 9, **TINY}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4, **TINY}, projection_dim=6)
    ).eval()
    features = saved(model, tmp_path / "clip")
    assert features.num_features == 6
    expected = model.get_image_features(pixel_values=by_hand(images)).pooler_output
    torch.testing.assert_close(features(images), expected, atol=1e-5, rtol=0)


def test_a_fingerprint_is_that_of_weights_and_processor_and_not_of_the_place(
    features, network, make_network, tmp_path
):
    same = load_features(str(make_network(tmp_path / "elsewhere")))
    assert same.fingerprint == features.fingerprint
    ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=False).save_pretrained(tmp_path / "elsewhere")
    assert load_features(str(tmp_path / "elsewhere")).fingerprint != features.fingerprint
    model = ViTModel.from_pretrained(network)
    with torch.no_grad():
        model.layernorm.bias[0] += 1e-3
    assert saved(model, tmp_path / "trained").fingerprint != features.fingerprint


class TestRefused:
    def test_no_image_processor(self, tmp_path):
        ViTModel(ViTConfig(image_size=8, patch_size=4, **TINY)).save_pretrained(tmp_path / "bare")
        with pytest.raises(ValueError, match=r"bare has no image processor \(preprocessor_config.json\)"):
            load_features(str(tmp_path / "bare"))

    def test_no_vision_model(self, tmp_path):
        with pytest.raises(ValueError, match="bert is no vision model: BertModel reads input_ids, not pixel_values"):
            saved(BertModel(BertConfig(vocab_size=9, **TINY)), tmp_path / "bert")

    def test_no_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"is no model of transformers: it has no config.json"):
            load_features(str(tmp_path))

    def test_missing_weights(self, network, tmp_path):
        model = ViTModel.from_pretrained(network)
        weights = {name: tensor for name, tensor in model.state_dict().items() if "layernorm_after" not in name}
        model.save_pretrained(tmp_path / "less", state_dict=weights)
        ViTImageProcessorPil().save_pretrained(tmp_path / "less")
        with pytest.raises(ValueError, match=r"less lacks weights of its ViTModel, such as .*layernorm_after"):
            load_features(str(tmp_path / "less"))

    def test_damaged_weights(self, make_network, tmp_path):
        file = make_network(tmp_path / "cut") / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(OSError, match=r"the weights in .*cut are damaged, or were not downloaded to their end"):
            load_features(str(tmp_path / "cut"))

    @pytest.mark.parametrize("damage", ["cut", "text", "empty"])
    def test_damaged_weights_of_torch(self, damage, make_network, tmp_path):
        safetensors = make_network(tmp_path / "old") / "model.safetensors"
        file = safetensors.with_name("pytorch_model.bin")
        # torch sees the end of a small archive and of a large one in different ways.
        torch.save({**load_file(safetensors), "unused": torch.zeros(100_000)}, file)
        safetensors.unlink()
        load_features(str(file.parent))
        file.write_bytes({"cut": file.read_bytes()[:-300], "text": b"no weights", "empty": b""}[damage])
        with pytest.raises(OSError, match=r"the weights in .*old are damaged, or were not downloaded to their end"):
            load_features(str(file.parent))

    def test_weights_of_another_config(self, make_network, tmp_path):
        config = make_network(tmp_path / "wide") / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
        with pytest.raises(ValueError, match=r"wide has a component whose weights do not fit its config.json"):
            load_features(str(tmp_path / "wide"))

    @pytest.mark.parametrize("damage", ["cut", "text", "empty", "other weights"])
    def test_damaged_weights_of_inception(self, damage, monkeypatch, tmp_path):
        def network(*arguments, **options):
            """Loads its weights as torch-fidelity does."""
            weights = torch.hub.load_state_dict_from_url(f"https://host/{INCEPTION_WEIGHTS}")
            torch.nn.Linear(2, 2).load_state_dict(weights)

        monkeypatch.setattr("torchmetrics.image.fid.FrechetInceptionDistance", network)
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        file = tmp_path / "hub" / "checkpoints" / INCEPTION_WEIGHTS
        file.parent.mkdir(parents=True)
        torch.save({"some": torch.zeros(2)}, file)
        if damage != "other weights":
            file.write_bytes({"cut": file.read_bytes()[:-300], "text": b"no weights", "empty": b""}[damage])
        with pytest.raises(OSError, match=f"the weights of Inception in .*{INCEPTION_WEIGHTS} are damaged: put "):
            load_features("inception")

    def test_weights_of_inception_that_are_not_there(self, monkeypatch, tmp_path):
        def network(*arguments, **options):
            raise OSError("no network")

        monkeypatch.setattr("torchmetrics.image.fid.FrechetInceptionDistance", network)
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        with pytest.raises(OSError, match=r"the weights of Inception can not be downloaded \(no network\): put "):
            load_features("inception")

    def test_a_revision_of_inception(self):
        with pytest.raises(ValueError, match="a revision is of a model on the Hub"):
            load_features("inception", revision="main")
