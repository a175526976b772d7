"""Pipelines that sample any of our models, or a stock diffusers U-Net, with any scheduler that fits."""
