"""Shared set-up of the tests."""

from __future__ import annotations

import torch

# The models are tiny: further threads only wait for each other.
torch.set_num_threads(1)
