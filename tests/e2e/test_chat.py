"""`overspill run` without a prompt: a conversation through a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.text.chat import ChatTemplate
from tests.helpers.cli import ROOT
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
OPTIONS = ["-dev", "cpu", "-t", "1", "-ub", "8", "-c", "512", "--temp", "0", "--prefix-reuse", "whole-ubatches"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
TALK = ["-n", "6", *OPTIONS]


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overspill.cli", "run", "-m", str(MODEL), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")


def talk(lines: str, *args: str) -> tuple[int, str, str]:
    """What a whole conversation prints."""
    with start(*TALK, *args) as process:
        out, err = process.communicate(lines, timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, devices="cpu", n_ctx=512, n_ubatch=8, threads=1, prefix_reuse="whole-ubatches") as llm:
        yield llm


def answers(llm: LLM, *said: str, system: str | None = None) -> list[str]:
    """The same conversation, each answer computed anew from the whole of it."""
    template = ChatTemplate.from_keys(llm.source.keys)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for text in said:
        messages.append({"role": "user", "content": text})
        segments = template.render_marked(messages, special_texts=llm.tokenizer.special_texts)
        answer = llm.generate(llm.tokenizer.encode_marked(segments), GREEDY).text
        assert "think" not in answer, "the tiny model has begun to think: choose other words"
        messages.append({"role": "assistant", "content": answer})
        found.append(answer)
    return found


def test_a_conversation_remembers_and_forgets(llm: LLM) -> None:
    first, second = answers(llm, "Hello", "Hello")
    assert first != second
    code, out, err = talk("Hello\nHello\n/reset\n\nHello\n/exit\nHello\n")
    assert code == 0, err
    assert out == f"{first}\n{second}\n{first}\n"
    assert err.count("(forgotten)") == 1
    read = [tuple(map(int, numbers)) for numbers in re.findall(r"\((\d+) \+ (\d+) tokens read", err)]
    assert len(read) == 3
    assert sum(read[1]) > sum(read[0]) == sum(read[2])
    assert read[1][0] >= sum(read[0]) // 8 * 8, "the first prompt is reused, at least in whole ubatches"


def test_the_end_of_the_input_leaves_and_a_backslash_goes_on(llm: LLM) -> None:
    (both,) = answers(llm, "one\ntwo", system="Be brief.")
    code, out, err = talk("one\\\ntwo", "--system", "Be brief.")
    assert (code, out) == (0, f"{both}\n"), err


def test_what_is_refused_is_told_and_forgotten(llm: LLM) -> None:
    (hello,) = answers(llm, "Hello")
    code, out, err = talk("word " * 600 + "\nHello\n")
    assert (code, out) == (0, f"{hello}\n"), err
    assert "fit into a context of 512" in err


def test_bytes_that_are_no_text_do_no_harm() -> None:
    command = [sys.executable, "-m", "overspill.cli", "run", "-m", str(MODEL), *TALK]
    done = subprocess.run(command, cwd=ROOT, input=b"\xff\xfe\n/exit\n", capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") >= 1


def test_a_terminal_has_a_prompt_and_an_interrupt_there_ends_nothing() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "overspill.cli", "run", "-m", str(MODEL), *TALK]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 300
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)

    try:
        wait_for(b"> ")
        process.send_signal(signal.SIGINT)
        os.write(ours, b"\n")  # a signal between the prompt and the reading is seen when the line ends
        wait_for(b"(/exit or Ctrl-D leaves)")
        os.write(ours, b"Hello\n")
        wait_for(b"written at")
        os.write(ours, b"/exit\n")
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("n_interrupts", [1, 1000])
def test_interrupts_stop_the_answer_and_not_the_program(n_interrupts: int) -> None:
    with start("-n", "-1", *OPTIONS, "-c", "8192", "--repeat-penalty", "1.3", "--ignore-eos") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("Tell me everything\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # the answer has begun
        for _ in range(n_interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.0003)  # signals that come at once are one
        told = next(line for line in process.stderr if line.startswith("("))
        assert told == "(stopped)\n"
        process.stdin.write("/exit\n")
        process.stdin.close()
        process.stdout.read()
        assert process.wait(300) == 0
