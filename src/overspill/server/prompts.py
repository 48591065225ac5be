"""Prompts of requests to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody
from overspill.text.chat import ChatTemplate
from overspill.text.special import Segment
from overspill.text.tokenizer import Tokenizer


def prompts_of(tokenizer: Tokenizer, prompt: Any) -> list[list[int]]:
    """The prompts that a `prompt` field holds: a text, ids, texts and ids mixed, or a list of these.

    A list of texts is several prompts; a list with an id directly in it is one. ApiError 400 for anything else.
    """
    if not isinstance(prompt, list):
        return [_ids_of(tokenizer, prompt)]
    if not prompt:
        raise ApiError(400, "Field 'prompt': it is empty")
    if any(_is_id(item) for item in prompt):
        return [_ids_of(tokenizer, prompt)]
    return [_ids_of(tokenizer, item) for item in prompt]


def chat_segments(tokenizer: Tokenizer, template: ChatTemplate, body: ChatBody) -> list[Segment]:
    """A conversation as the model's template writes it, its markup told from what clients wrote.

    The last segment is the beginning of the answer where the request has one.
    """
    variables = dict(body.chat_template_kwargs)
    if not body.thinks:
        variables.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    begun = [Segment(begun_text(body), is_markup=False)] if body.continue_final_message else []
    segments = template.render_marked(
        body.messages[: len(body.messages) - len(begun)],
        special_texts=tokenizer.special_texts,
        tools=body.offered_tools or None,
        add_generation_prompt=bool(begun) or body.add_generation_prompt,
        template_kwargs=variables,
    )
    return [*segments, *begun]


def begun_text(body: ChatBody) -> str:
    """The beginning of the answer: the text of the last message."""
    last = body.messages[-1]
    content = last.get("content")
    if len(body.messages) < 2 or last.get("role") != "assistant" or last.get("tool_calls"):
        raise ApiError(
            400, "Field 'continue_final_message': the last of several messages has to be an assistant's text"
        )
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not content:
        raise ApiError(400, "Field 'continue_final_message': the last message has no text to go on from")
    return content


def mixed_ids(
    tokenizer: Tokenizer, content: str | Sequence[Any], *, field: str, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of a text, or of texts and ids in a row; only a text in the first place gets a BOS."""
    if isinstance(content, str):
        return tokenizer.encode(content, add_special=add_special, parse_special=parse_special)
    ids: list[int] = []
    for item in content:
        if isinstance(item, str):
            ids += tokenizer.encode(item, add_special=False, parse_special=parse_special)
        else:
            ids.append(checked_id(tokenizer, item, field))
    needs_bos = add_special and tokenizer.add_bos and bool(content) and isinstance(content[0], str)
    if needs_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def checked_id(tokenizer: Tokenizer, value: Any, field: str) -> int:
    """A token id; ApiError 400 if it is none of the vocabulary."""
    if not _is_id(value) or not 0 <= value < tokenizer.n_vocab:
        raise ApiError(400, f"Field '{field}': {_shown(value)} is no token id, give 0 to {tokenizer.n_vocab - 1}")
    return int(value)


def _ids_of(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise ApiError(400, "Field 'prompt.multimodal_data': this server takes text only")
        prompt = prompt["prompt_string"]
    if not isinstance(prompt, str | list):
        raise ApiError(400, f"Field 'prompt': {_shown(prompt)} found, give a text, token ids, or a list of these")
    ids = mixed_ids(tokenizer, prompt, field="prompt", add_special=True)
    if not ids:
        raise ApiError(400, "Field 'prompt': it is empty, give at least one token")
    return ids


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
