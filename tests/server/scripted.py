"""A model that says what a test wants it to, in the way of models with tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from overspill.server.dialect import Dialect
from overspill.text.chat import ChatTemplate
from tests.server.served import Served

SOURCE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} call as <tool_call>{name, arguments}</tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}</think>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = '{"city": "Zürich"}'
THOUGHTS = "<think>\nLet me see.\n</think>\n\n"
ANSWER = f'{THOUGHTS}I ask.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
Says = Callable[[str], None]


def scripted(served: Served, monkeypatch: pytest.MonkeyPatch, source: str = SOURCE) -> Says:
    """Makes the model say a text, then its end token. source: of its chat template."""
    tokenizer = served.llm.tokenizer
    monkeypatch.setattr(served.host, "template", ChatTemplate(source, bos_text="<s>", eos_text="</s>"))
    monkeypatch.setattr(served.host, "dialect", Dialect.of(source))

    def say(text: str) -> None:
        script = iter([*tokenizer.encode(text, add_special=False), tokenizer.eos_id])

        def row() -> torch.Tensor:
            logits = torch.zeros(tokenizer.n_vocab)
            logits[next(script)] = 50
            return logits

        def run_wave(wave: Any) -> list[torch.Tensor]:
            return [torch.stack([row() for _ in u.output_rows]) for u in wave.ubatches if u.output_rows]

        monkeypatch.setattr(served.llm._engine, "_run_wave", run_wave)

    return say
