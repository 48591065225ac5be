"""Who may import whom: the layers of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "overspill"
LAYERS = [
    {"errors", "gguf", "quant", "options", "sampling_flags", "gpu_memory", "letter_room"},
    {"kernels", "cache", "placement", "device", "text"},
    {"models"},
    {"pipeline"},
    {"engine"},
    {"needs", "saved_rates"},
    {"hardware", "calibration"},
    {"llm"},
    {"cli", "commands", "bench", "server"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
SIBLINGS_ALLOWED = {
    ("quant", "gguf"),
    ("gguf", "errors"),
    ("quant", "errors"),
    ("options", "errors"),
    ("sampling_flags", "errors"),
}
NO_TORCH = [
    "gguf/*",
    "text/*",
    "placement/*",
    "models/specs/*",
    "models/registry.py",
    "models/check.py",
    "cache/cells.py",
    "cache/images.py",
    "cache/rings.py",
    "cache/states.py",
    "pipeline/wave.py",
    "pipeline/rows.py",
    "pipeline/split.py",
    "pipeline/ledger.py",
    "pipeline/schedule.py",
    "pipeline/simulate.py",
    "pipeline/choose.py",
    "pipeline/lay_out.py",
    "pipeline/slabs.py",
    "pipeline/host_budget.py",
    "pipeline/parties.py",
    "pipeline/spread.py",
    "pipeline/letter_sizes.py",
    "pipeline/step_budget.py",
    "models/describe.py",
    "needs.py",
    "saved_rates.py",
    "gpu_memory.py",
    "letter_room.py",
    "commands/plan.py",
    "engine/request.py",
    "engine/scheduler.py",
    "engine/slots.py",
    "engine/sequence.py",
    "engine/pace.py",
    "options.py",
    "cli.py",
]
ONLY_IN = {
    "triton": "kernels/triton/",
    "numba": "kernels/numba/",
    "llvmlite": "kernels/numba/",
    "jinja2": "text/",
    "tokenizers": "text/",
    "fastapi": "server/",
    "starlette": "server/",
    "uvicorn": "server/",
    "pydantic": "server/",
    "prometheus_client": "server/",
    "llguidance": "text/constrain.py",
    "matplotlib": "pipeline/trace.py",
}
DATA = Path(__file__).parent / "data"
MODEL, MACHINE = DATA / "models" / "qwen3moe.gguf", DATA / "machines" / "two-24gb.json"
PLAN_AND_LOOK = """
import sys
from overspill.cli import main
try:
    main()
finally:
    assert not {"torch", "triton", "numba"} & sys.modules.keys()
"""
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Path inside the package, with forward slashes."""
    return path.relative_to(PACKAGE).as_posix()


@cache
def imports(path: Path, *, at_run_time: bool = True) -> set[str]:
    """Modules a file imports anywhere; without `at_run_time`, not those inside functions or TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if at_run_time else list(_at_module_level(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _at_module_level(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def rooms_imported(path: Path) -> set[str]:
    """Top-level rooms of the package that a file imports."""
    parts = (module.split(".") for module in imports(path) if module.startswith("overspill."))
    return {p[1] for p in parts if p[1] in LEVEL}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_layers(path: Path) -> None:
    room = name_of(path).split("/")[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    assert room in LEVEL, f"{name_of(path)}: give this room a layer in docs/architecture.md and here"
    for other in rooms_imported(path) - {room}:
        is_sibling = LEVEL[other] == LEVEL[room] and room not in ("cli", "commands", "bench")
        assert LEVEL[other] <= LEVEL[room], f"{name_of(path)} imports {other}, which stands above it"
        assert not is_sibling or (room, other) in SIBLINGS_ALLOWED, f"{name_of(path)} imports its sibling {other}"


@pytest.mark.parametrize(
    "what", [("--shape", "qwen3-30b-a3b", "--quant", "Q4_K"), ("-m", str(MODEL))], ids=["shape", "file"]
)
def test_a_plan_for_a_machine_one_does_not_have_needs_no_torch(what: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PLAN_AND_LOOK, "plan", *what, "--machine", str(MACHINE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "predicted" in ran.stdout


def test_models_know_no_device() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        assert "device" not in rooms_imported(path), name_of(path)


@pytest.mark.parametrize("pattern", NO_TORCH)
def test_without_torch(pattern: str) -> None:
    paths = sorted(PACKAGE.glob(pattern))
    assert paths, f"{pattern} names nothing"
    for path in paths:
        at_top = imports(path, at_run_time=False)
        assert not {m for m in at_top if m.split(".")[0] == "torch"}, f"{name_of(path)} imports torch"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    libraries = {module.split(".")[0] for module in imports(path)}
    for library, room in ONLY_IN.items():
        if library in libraries:
            assert name_of(path).startswith(room), f"{name_of(path)} imports {library}, which belongs in {room}"


def test_torch_cuda_stays_in_its_rooms() -> None:
    for path in FILES:
        if "torch.cuda." in path.read_text():
            assert name_of(path).startswith(("device/cuda.py", "device/factory.py", "kernels/triton/")), name_of(path)


def test_no_file_outgrows_its_room() -> None:
    too_long = {name_of(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not too_long, too_long


def test_the_table_is_whole() -> None:
    rooms = {name_of(p).split("/")[0].removesuffix(".py") for p in FILES} - {"__init__", "__main__"}
    assert rooms <= LEVEL.keys()
    assert sys.version_info >= (3, 11)
