"""diffusers models whose long skip connections are scaled."""
