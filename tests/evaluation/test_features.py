"""Features are those of the model, whatever the batch; and a fingerprint tells networks apart."""

import pytest
import torch
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

    def test_a_revision_of_inception(self):
        with pytest.raises(ValueError, match="a revision is of a model on the Hub"):
            load_features("inception", revision="main")
