"""The command line: run, serve, bench, plan, calibrate, info, perplexity, trace.

A command's own parameters stand in its signature; the options of `Options` are added to it from their declarations,
so that a flag is spelled, explained and parsed in one place. Bad input ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from overspill.errors import UserError
from overspill.options import FLAGS, HELP
from overspill.sampling_flags import SAMPLING_FLAGS, sampling_fields

app = typer.Typer(
    name="overspill",
    help="Mixture-of-Experts models that are bigger than the GPUs' memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelFile = Annotated[Path, typer.Option("--model", "-m", help="GGUF file; any part of a split one")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def _with_options(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags of `Options` to a command; it receives those that were given as the dict `options`."""
    names = [name for name in FLAGS if name not in leave_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            command(options={k: v for k, v in options.items() if v not in (None, False, [])}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=_flag(n), default=None) for n in names]
        for parameter in added:
            if parameter.annotation.__origin__ is bool:
                added[added.index(parameter)] = parameter.replace(default=False)
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "options"]
        wrapper.__signature__ = inspect.Signature(kept + added)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of `SAMPLING_FLAGS` to a command; it receives them as the dict `sampling_flags`."""

    @wraps(command)
    def wrapper(**given: Any) -> None:
        command(sampling_flags={name: given.pop(name) for name in SAMPLING_FLAGS}, **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[
                flag.kind if flag.kind in (bool, list[str] | None) else flag.kind | None,
                typer.Option(*flag.flags, help=flag.doc, rich_help_panel="Sampling"),
            ],
            default=False if flag.kind is bool else None,
        )
        for name, flag in SAMPLING_FLAGS.items()
    ]
    kept = [p for p in own if p.name not in ("sampling_flags", *SAMPLING_FLAGS)]
    wrapper.__signature__ = inspect.Signature(kept + added)  # type: ignore[attr-defined]
    return wrapper


def _flag(name: str) -> Any:
    option = typer.Option(*FLAGS[name], help=HELP[name], rich_help_panel="Machine and plan")
    kinds = dict.fromkeys(("cpu_moe", "force_xdev_sync", "swa_full"), bool)
    kind: Any = {**kinds, "override_tensor": list[str] | None}.get(name, str | None)
    return Annotated[kind, option]


@app.command()
@_with_options()
@_with_sampling
def run(
    *,
    model: ModelFile,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="text to continue")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="read the prompt from a file; -p follows it")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="wrap the prompt in the model's chat template")] = False,
    system: Annotated[
        str | None, typer.Option("--system", "-sys", help="system message of a conversation (without -p and -f)")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", "--reverse-prompt", "-r", help="text that ends the answer")
    ] = None,
    as_json: AsJson = False,
    sampling_flags: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Continue a prompt; without one, talk: a conversation in the terminal."""
    from overspill.commands.chat import run_chat
    from overspill.commands.run import run_prompt

    fields = sampling_fields(sampling_flags)
    if prompt is None and file is None:
        if as_json:
            raise UserError("--json: a conversation has no JSON; give a prompt with -p or -f")
        run_chat(model, fields, system=system, stop=stop or (), options=options)
        return
    if system is not None:
        raise UserError("--system: it is for a conversation; leave out -p and -f")
    run_prompt(
        model, _prompt_text(prompt, file), fields, stop=stop or (), is_chat=chat, as_json=as_json, options=options
    )


@app.command()
@_with_options("trace")
@_with_sampling
def serve(
    *,
    model: ModelFile,
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; others than this one: 0.0.0.0")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="port to listen on; 0: a free one")] = 8080,
    api_key: Annotated[str | None, typer.Option("--api-key", help="keys that clients must have one of: K1,K2")] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="the same, a key a line")] = None,
    alias: Annotated[str | None, typer.Option("--alias", "-a", help="name of the model in answers")] = None,
    api_prefix: Annotated[str, typer.Option("--api-prefix", help="put before every path, as in /llm")] = "",
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="Jinja template instead of the model's own")
    ] = None,
    chat_template_file: Annotated[
        Path | None, typer.Option("--chat-template-file", help="the same, from a file")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option("--chat-template-kwargs", help="JSON object of variables for the template")
    ] = None,
    reasoning_format: Annotated[
        str | None, typer.Option("--reasoning-format", help="thoughts: auto, deepseek (apart) or none (in the text)")
    ] = None,
    reasoning_budget: Annotated[
        int | None, typer.Option("--reasoning-budget", help="0: no thoughts; -1: as many as the model likes")
    ] = None,
    reasoning: Annotated[
        str, typer.Option("--reasoning", "-rea", help="on or off, where the template can; auto: as it is")
    ] = "auto",
    stop: Annotated[
        list[str] | None, typer.Option("--stop", "--reverse-prompt", "-r", help="text that ends an answer")
    ] = None,
    sse_ping_interval: Annotated[
        float, typer.Option("--sse-ping-interval", help="longest silence of a stream, in seconds")
    ] = 10,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="the page at /")] = True,
    cache_prompt: Annotated[
        bool, typer.Option("--cache-prompt/--no-cache-prompt", help="reuse what a slot has of a prompt")
    ] = True,
    sampling_flags: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Serve the model over HTTP: OpenAI's endpoints and llama-server's."""
    _require_server()
    from overspill.commands.serve import request_defaults, serve_model
    from overspill.server.settings import ServerSettings

    keys = [*(api_key.split(",") if api_key is not None else []), *_lines_of(api_key_file)]
    defaults = sampling_fields(sampling_flags) | request_defaults(
        chat_template_kwargs, reasoning_format, reasoning_budget, reasoning, stop=stop or (), caches=cache_prompt
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=frozenset(keys),
        name=alias or "",
        api_prefix=api_prefix,
        ping_s=sse_ping_interval,
        has_page=ui,
        defaults=defaults,
    )
    template = _read_text(chat_template_file) if chat_template_file is not None else chat_template
    serve_model(model, settings, options, template)


def _lines_of(file: Path | None) -> list[str]:
    return [] if file is None else [line.strip() for line in _read_text(file).splitlines() if line.strip()]


def _require_server() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'overspill[server]'")


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    parts = [] if file is None else [_read_text(file)]
    return "\n\n".join(parts + ([] if prompt is None else [prompt]))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text ({error})") from None


@app.command()
@_with_options("schedule", "n_parallel")
def bench(
    *,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="GGUF file; any part of a split one")] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="random model of a named shape instead of a file")
    ] = None,
    quant: Annotated[str, typer.Option("--quant", help="tensor type of a random model")] = "Q8_0",
    layers: Annotated[int | None, typer.Option("--layers", help="depth of a random model")] = None,
    n_prompt: Annotated[str, typer.Option("--n-prompt", "-p", help="prompt lengths, comma-separated")] = "512",
    n_gen: Annotated[str, typer.Option("--n-gen", "-n", help="tokens to generate, comma-separated")] = "128",
    pg: Annotated[list[str] | None, typer.Option("-pg", help="prompt,gen measured together; repeatable")] = None,
    depth: Annotated[str, typer.Option("--n-depth", "-d", help="context before the test, comma-separated")] = "0",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="of each test")] = 5,
    schedule: Annotated[str, typer.Option("--schedule", help="schedules to compare, comma-separated")] = "auto",
    output: Annotated[str, typer.Option("--output", "-o", help="md, json, jsonl or csv")] = "md",
    text: Annotated[Path | None, typer.Option("--text", help="take prompts from this text; else random ids")] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="measure a server that runs at this URL instead", metavar="URL")
    ] = None,
    clients: Annotated[str, typer.Option("--clients", help="of --server: clients at once, comma-separated")] = "1",
    api_key: Annotated[str | None, typer.Option("--api-key", help="of --server")] = None,
    options: dict[str, Any],
) -> None:
    """Measure prompt processing (pp) and generation (tg), like llama-bench; or a server, as its users meet it."""
    from overspill.bench.bench import BenchRequest, bench_all
    from overspill.bench.report import OUTPUTS
    from overspill.bench.server import ServerBench
    from overspill.commands.bench_server import measure_server

    if server is not None:
        if options or model is not None or shape is not None:
            raise UserError("--server: that server has its model and options; leave out -m, --shape and their options")
        typer.echo(
            measure_server(
                server,
                ServerBench.parse(
                    n_prompt=n_prompt, n_gen=n_gen, pairs=pg or (), clients=clients, repetitions=repetitions
                ),
                output=output,
                api_key=api_key,
                text=None if text is None else _read_text(text),
            )
        )
        return
    if output not in OUTPUTS:
        raise UserError(f"-o {output}: choose one of {', '.join(OUTPUTS)}")
    request = BenchRequest.parse(
        n_prompt=n_prompt, n_gen=n_gen, pairs=pg or (), depths=depth, schedules=schedule, repetitions=repetitions
    )
    source = _model_or_shape(model, shape, quant, layers)
    typer.echo(OUTPUTS[output](bench_all(source, request, options, text=None if text is None else _read_text(text))))


def _model_or_shape(model: Path | None, shape: str | None, quant: str, layers: int | None) -> Any:
    from overspill.bench.synth import synthetic
    from overspill.gguf import open_gguf

    if (model is None) == (shape is None):
        raise UserError("give either -m FILE or --shape NAME")
    return open_gguf(model) if model is not None else synthetic(str(shape), quant=quant, n_layer=layers)


@app.command()
@_with_options()
def plan(
    *,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="GGUF file; any part of a split one")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="plan for a named shape instead of a file")] = None,
    quant: Annotated[str, typer.Option("--quant", help="tensor type of the named shape")] = "Q8_0",
    layers: Annotated[int | None, typer.Option("--layers", help="depth of the named shape")] = None,
    machine: Annotated[Path | None, typer.Option("--machine", help="JSON of a machine one does not have")] = None,
    schedule_grid: Annotated[bool, typer.Option("--schedule-grid", help="print the schedule, a row a stream")] = False,
    as_json: AsJson = False,
    options: dict[str, Any],
) -> None:
    """Where everything would go and how fast it would be, without loading weights."""
    from overspill.commands.plan import make_plan, plan_dict, plan_text

    made = make_plan(_model_or_shape(model, shape, quant, layers), machine, options)
    typer.echo(json.dumps(plan_dict(made), indent=1) if as_json else plan_text(made, with_grid=schedule_grid))


@app.command()
@_with_options(*FLAGS.keys() - {"devices", "device_memory", "threads", "h2d_gbps"})
def calibrate(
    *,
    quant: Annotated[str, typer.Option("--quant", help="tensor types to measure, comma-separated")] = "Q8_0,Q4_K",
    as_json: AsJson = False,
    options: dict[str, Any],
) -> None:
    """Measure at what rates links and CPU read experts while all do, and keep that for models that spread them."""
    from overspill.commands.calibrate import run_calibrate

    typer.echo(run_calibrate(quant, as_json=as_json, options=options))


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="GGUF file; any part of a split one")],
    check: Annotated[bool, typer.Option("--check", help="verify all that loading needs; exit code 0 or 2")] = False,
    as_json: AsJson = False,
) -> None:
    """What is in a file."""
    from overspill.commands.info import check_file, info_dict, info_text

    if check:
        typer.echo(check_file(file))
    else:
        typer.echo(json.dumps(info_dict(file), indent=1) if as_json else info_text(file))


@app.command()
@_with_options()
def perplexity(
    *,
    model: ModelFile,
    file: Annotated[Path, typer.Option("--file", "-f", help="UTF-8 text")],
    n_tokens: Annotated[int | None, typer.Option("--tokens", help="only the first N tokens of the text")] = None,
    as_json: AsJson = False,
    options: dict[str, Any],
) -> None:
    """How well the model predicts a text: exp of the mean loss per token, in windows of the context."""
    from overspill.commands.perplexity import measure_perplexity

    typer.echo(measure_perplexity(model, _read_text(file), n_tokens=n_tokens, as_json=as_json, options=options))


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="trace written by --trace")],
    out: Annotated[Path, typer.Option("--output", "-o", help="PNG to write")],
) -> None:
    """Draw a trace: one row per device and stream."""
    from overspill.commands.files import check_writable
    from overspill.pipeline.trace import draw_trace

    if out.suffix.lower() != ".png":
        raise UserError(f"-o {out}: give a name that ends in .png")
    check_writable("-o", out)
    draw_trace(file, out)


# The parser's base class of everything that can be wrong with a command line; typer shows only its descendants.
_BadCommandLine: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of the `overspill` command."""
    logging.basicConfig(level=logging.WARNING, format="overspill: %(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code = app(args=_arguments(sys.argv[1:]), prog_name="overspill", standalone_mode=False)
    except UserError as error:
        _refuse(str(error))
    except _BadCommandLine as error:
        message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
        _refuse(f"{message}; see overspill --help")
    except BrokenPipeError:
        raise SystemExit(141) from None
    raise SystemExit(code)


def _arguments(given: list[str]) -> list[str]:
    """The command line, flags of llama-server and llama-cli translated where they mean something here."""
    if given[:1] in (["serve"], ["run"]):
        from overspill.commands.llama_flags import translated

        return [given[0], *translated(given[1:])]
    return given or ["--help"]


def _refuse(message: str) -> NoReturn:
    print(f"overspill: error: {message}", file=sys.stderr)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
