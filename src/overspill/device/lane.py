"""The streams of a device, by purpose. Free of torch, so that schedules and their simulation can name them."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    """Uploads and hand-offs have streams of their own, so that they overlap with compute."""

    COMPUTE = "compute"
    UPLOAD = "upload"
    HAND_OFF = "hand_off"
