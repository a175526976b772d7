"""The private parts of torch and diffusers that the package uses still work as it expects."""

import pytest

from scalelong_diffusers import internals


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapter_names(sd):
    peft = pytest.importorskip("peft")
    unet = sd.build()
    assert internals.adapter_names(unet) == []
    for name in ("first", "second"):
        unet.add_adapter(peft.LoraConfig(target_modules=["to_q"]), adapter_name=name)
    assert internals.adapter_names(unet) == ["first", "second"]
    unet.unload_lora()
    assert internals.adapter_names(unet) == []
