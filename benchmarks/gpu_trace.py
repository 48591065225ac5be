"""Traces and pictures of two GPUs, breadth-first against depth-first: python benchmarks/gpu_trace.py OUT_DIR."""

from __future__ import annotations

import sys
from pathlib import Path

from overspill import LLM
from overspill.bench.bench import Test, measure
from overspill.bench.synth import synthetic
from overspill.pipeline.trace import draw_trace, write_trace

N_LAYER, N_PROMPT, N_UBATCH = 12, 32768, 4096


def main(out: Path) -> None:
    """One prompt under each schedule, warmed up, then traced."""
    out.mkdir(parents=True, exist_ok=True)
    source = synthetic("qwen3-30b-a3b", quant="Q8_0", n_layer=N_LAYER)
    common = {"devices": "cuda:0,cuda:1", "n_ctx": N_PROMPT, "n_wave": N_PROMPT, "n_ubatch": N_UBATCH, "cpu_moe": True}
    for schedule, grain in (("breadth-first", 1), ("depth-first", N_LAYER // 2)):
        with LLM(source, schedule=schedule, grain=grain, **common) as llm:
            warm = measure(llm, Test(N_PROMPT, 0, 0), 1)
            llm.start_trace()
            measure(llm, Test(N_PROMPT, 0, 0), 1)
            spans = {name: spans[len(spans) // 2 :] for name, spans in llm.take_trace().items() if name != "cpu"}
            path = out / f"h200-x2-{schedule}.json"
            write_trace(spans, path)
            draw_trace(path, path.with_suffix(".png"))
            print(f"{schedule}: {warm.avg_ts:.0f} tokens/s, {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
