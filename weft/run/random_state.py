"""The state of a device's random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's generator."""
    state: Tensor = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Give the device's generator a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
