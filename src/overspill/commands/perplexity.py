"""`overspill perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from overspill.commands.files import open_for_text
from overspill.commands.screen import bar, loading_bar
from overspill.errors import UserError
from overspill.llm import LLM


def measure_perplexity(
    model: Path, text: str, *, n_tokens: int | None, as_json: bool, options: Mapping[str, Any]
) -> str:
    """Perplexity of a text over its tokens: one line, or JSON with the loss of every token."""
    source = open_for_text(model)
    with loading_bar() as progress:
        llm = LLM(source, progress=progress, **options)
    with llm:
        ids = llm.tokenizer.encode(text)[:n_tokens]
        losses = token_losses(llm, ids)
        perplexity = math.exp(sum(losses) / len(losses))
        if as_json:
            counters = llm.counters()
            return json.dumps({"perplexity": perplexity, "n_tokens": len(ids), "nll": losses, "counters": counters})
    return f"perplexity {perplexity:.4f} over {len(losses)} predicted tokens of {len(ids)}"


def token_losses(llm: LLM, ids: list[int]) -> list[float]:
    """-log p of each token after the first of its window; windows are as long as the context."""
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} token(s): perplexity needs at least two")
    window = llm.sizes.n_cells
    losses: list[float] = []
    with bar("perplexity", "tokens") as update:
        for first in range(0, len(ids) - 1, window):
            piece = ids[first : first + window]
            if len(piece) > 1:
                targets = torch.tensor(piece[1:])
                losses += F.cross_entropy(llm.logits(piece)[:-1], targets, reduction="none").tolist()
            update(first + len(piece), len(ids))
    return losses
