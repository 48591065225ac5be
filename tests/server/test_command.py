"""`overspill serve` that cannot begin: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from typer.main import get_command

from overspill.cli import app
from overspill.commands import serve
from overspill.commands.llama_flags import translated
from overspill.server.settings import ServerSettings
from tests.helpers import gguf_files
from tests.helpers.cli import main
from tests.server.served import MODEL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "99999"], "--port 99999"),
        (["--api-prefix", "llm"], "--api-prefix llm"),
        (["--api-key", "a,,b"], "--api-key"),
        (["--np", "x"], "--np"),
        (["-np", "0"], "-np 0"),
        (["-m", "nowhere.gguf"], "nowhere.gguf"),
        (["--temp", "x"], "--temp"),
        (["--samplers", "top_k;nosuch"], "nosuch"),
        (["--mirostat", "3"], "mirostat"),
        (["--grammar", "root ::= nosuch"], "nosuch"),
        (["--api-key-file", "nowhere.txt"], "nowhere.txt"),
        (["--chat-template", "chatml"], "--chat-template chatml"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs"),
        (["--reasoning-format", "x"], "reasoning_format"),
        (["--reasoning-budget", "5"], "--reasoning-budget 5"),
        (["-ctk", "q4_0"], "-ctk q4_0: choose one of auto, f32, f16, bf16, q8_0"),
        (["--cache-type-k", "f16", "--cache-type-v=bf16"], "-ctv bf16"),
        (["--reasoning", "x"], "--reasoning x"),
        (["--sse-ping-interval", "0"], "--sse-ping-interval 0"),
        (["-ctkd", "f16"], "-ctkd: draft models are not supported"),
        (["--yarn-ext-factor", "1"], "--yarn-ext-factor: the model file says"),
        (["--lora", "x.gguf"], "--lora: adapters are not supported"),
        (["-fa", "on", "--jinja", "-hf", "a/b"], "-hf: models are read from files; give -m FILE"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    assert says in main(capsys, "serve", "-m", MODEL, "--port", "0", *flags).refusal


def test_flags_go_before_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    document = gguf_files.base().with_key("general.sampling.temp", gguf_files.f32(0.5))
    file.write_bytes(document.with_key("general.sampling.top_k", gguf_files.i32(20)).to_bytes())
    served: list[ServerSettings] = []
    monkeypatch.setattr(serve, "run_server", lambda host, settings: served.append(settings))
    serve.serve_model(file, ServerSettings(defaults={"top_k": 7}), {}, None)
    assert served[0].defaults == {"temperature": 0.5, "top_k": 7}


def settings_of(capsys: pytest.CaptureFixture[str], *flags: str) -> ServerSettings:
    """What `serve` with these flags would be served with."""
    with patch.object(serve, "run_server") as served:
        assert main(capsys, "serve", "-m", MODEL, *flags).code == 0
    settings = served.call_args[0][1]
    assert isinstance(settings, ServerSettings)
    return settings


def test_flags_that_requests_inherit(capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(capsys, "-r", "User:", "--stop", "x", "--reasoning", "off", "--sse-ping-interval", "30")
    assert settings.defaults == {"stop": ["User:", "x"], "chat_template_kwargs": {"enable_thinking": False}}
    assert (settings.ping_s, settings.has_page) == (30, True)
    assert settings_of(capsys, "--reasoning", "on").defaults == {"chat_template_kwargs": {"enable_thinking": True}}
    plain = settings_of(capsys, "--no-webui")
    assert (plain.defaults, plain.has_page) == ({}, False)


def test_flags_of_llama_server_are_translated() -> None:
    given = "-m x.gguf -fa on --jinja --no-mmap -cb --metrics -c 4096 --threads-http=4 -tb 8 --n-parallel 2 -p --jinja"
    want = "-m x.gguf --load-mode none -c 4096 --parallel 2 -p --jinja"
    assert translated(given.split()) == want.split()
    assert translated(["-fa"]) == []
    given, want = "-fa --cpu-moe -fa off -c 64 --flash-attn=auto -ngl 9", "--cpu-moe -c 64 -ngl 9"
    assert translated(given.split()) == want.split()


def test_no_flag_is_both_an_option_here_and_one_of_llama_servers_alone() -> None:
    """Whatever `serve` and `run` know themselves must reach them."""
    for command in ("serve", "run"):
        known = {flag for p in get_command(app).commands[command].params for flag in (*p.opts, *p.secondary_opts)}
        assert "--temp" in known
        for flag in known:
            assert translated([flag, "1"]) == [flag, "1"]


def test_a_model_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """It listens first; what loading finds ends it all the same."""
    small = ["-dev", "virtual:1", "--device-memory", "1KiB", "-ngl", "99", "-fit", "off"]
    ran = main(capsys, "serve", "-m", MODEL, "--port", "0", *small)
    assert ran.code == 2
    listening, error, end = ran.err.split("\n")
    assert listening.startswith("overspill: listening on http://127.0.0.1:")
    assert error.startswith("overspill: error: the model does not fit")
    assert end == ""
