"""OpenAI's own client against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from overspill.engine.params import SamplingParams
from tests.server.served import N_CTX, Served

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a wave?"}]
PROMPT = "def main():"


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_ids(served: Served) -> list[int]:
    prompt = served.host.template.render(MESSAGES)
    return served.llm.tokenizer.encode(prompt)


def expected(served: Served, ids: list[int], n: int = 24) -> str:
    return served.llm.generate(ids, SamplingParams(temperature=0, max_tokens=n)).text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat(client: openai.OpenAI, served: Served) -> None:
    ids = chat_ids(served)
    answer = client.chat.completions.create(model="any", messages=MESSAGES, temperature=0, max_tokens=24)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(served, ids)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    assert answer.usage.total_tokens == len(ids) + 24


def test_chat_stream(client: openai.OpenAI, served: Served) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *deltas, usage = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == expected(served, chat_ids(served))
    assert [c.choices[0].finish_reason for c in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 24


def test_text(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(model="any", prompt=PROMPT, temperature=0, max_tokens=24)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected(served, served.llm.tokenizer.encode(PROMPT))
    pieces = client.completions.create(model="any", prompt=PROMPT, temperature=0, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == answer.choices[0].text


def test_prompts_of_every_kind(client: openai.OpenAI, served: Served) -> None:
    ids = served.llm.tokenizer.encode(PROMPT)
    texts = [expected(served, ids, 8), expected(served, ids[:2], 8)]
    for prompt in ([PROMPT, served.llm.tokenizer.decode(ids[:2])], [ids, ids[:2]]):
        answer = client.completions.create(model="any", prompt=prompt, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1]


def test_several_answers(client: openai.OpenAI, served: Served) -> None:
    ask: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 12, "temperature": 3, "top_k": 0}
    del ask["top_k"]
    two = client.chat.completions.create(**ask, n=2, seed=7)
    one = client.chat.completions.create(**ask, seed=7)
    other = client.chat.completions.create(**ask, seed=8)
    assert [c.message.content for c in two.choices] == [
        one.choices[0].message.content,
        other.choices[0].message.content,
    ]
    assert one.choices[0].message.content != other.choices[0].message.content
    assert two.usage is not None
    assert two.usage.prompt_tokens == len(chat_ids(served))


def test_logprobs(client: openai.OpenAI, served: Served) -> None:
    """Against log-softmax of the logits of the same tokens."""
    ids = chat_ids(served)
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    tokens = served.llm.generate(ids, SamplingParams(temperature=0, max_tokens=8)).tokens
    reference = served.llm.logits(ids + tokens)[len(ids) - 1 : -1].log_softmax(-1)
    for entry, token, row in zip(logprobs.content, tokens, reference, strict=True):
        assert bytes(entry.bytes or []) == served.llm.tokenizer.piece(token, special=True)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_overflow(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="any", prompt=[5] * N_CTX, max_tokens=1)
    body: Any = refused.value.body
    assert body["type"] == "exceed_context_size_error"
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (N_CTX, N_CTX)
    answer = client.completions.create(model="any", prompt=[5] * (N_CTX - 1), max_tokens=100, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
