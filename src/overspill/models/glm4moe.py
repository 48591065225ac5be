"""GLM-4.5 and its kin: dense first layers, sigmoid routing with a bias for the choice, one or more shared experts."""

from __future__ import annotations

from overspill.models import qwen3
from overspill.models.specs.glm4moe import FFN_NORM


class Model(qwen3.Model):
    """Qwen3's attention, whose norms of heads a file may lack; the feed-forward's norm has another name."""

    ffn_norm = FFN_NORM
