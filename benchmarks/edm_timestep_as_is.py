"""train_unconditional.py for EDM, without the scale and offset of the U-ViT's timesteps."""

from scalelong_diffusers.train.train_unconditional import main
from scalelong_diffusers.training import models, run_script


if __name__ == "__main__":
    models.EDM_TIMESTEPS = {"timestep_scale": 1.0, "timestep_offset": 0.0}
    run_script(main)
