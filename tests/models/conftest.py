"""Small models run faster on one thread than on several, which get in the way of those of other test processes."""

import torch


torch.set_num_threads(1)
