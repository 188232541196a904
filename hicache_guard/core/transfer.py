"""What the host tells a device, without waiting for it.

A copy from ordinary memory may wait for the stream before it is staged, if it is large. From
pinned memory it does not; torch keeps that until the copy is done.
"""

from __future__ import annotations

import torch


def to_device(told: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``told`` on ``device``, of its dtype; itself where it lies there."""
    if device.type == "cuda" and told.device.type == "cpu":
        told = told.pin_memory()
    return told.to(device, non_blocking=True)
