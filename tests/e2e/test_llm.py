"""`LLM`: a file to logits and text, on the CPU and over virtual devices whose memory is too small for the experts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from overspill.engine.loop import EngineStopped
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, Request, TokenEvent
from overspill.errors import UserError
from overspill.llm import LLM
from tests.helpers.plain import DATA, SHARED

MODEL = DATA / "models" / "qwen3moe.gguf"
MODELS = ["llama", "mixtral", "qwen2", "qwen3", "qwen3-yarn", "qwen3moe"]
TOLERANCE = 2e-4  # of a float32 engine against either oracle; they differ by 2e-5
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
# Three devices that hold the layers but not the experts of all of them, and waves of several ubatches.
SPILLING: dict[str, Any] = {
    "devices": "virtual:3",
    "device_memory": "800KiB",
    "n_ubatch": 16,
    "n_wave": 64,
    "n_ctx": 160,
}


@pytest.fixture(scope="module")
def oracle() -> dict[str, np.ndarray]:
    return oracle_of("qwen3moe")


def oracle_of(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / "models" / f"{name}.npz") as arrays:
        return dict(arrays)


def open_model(name: str = "qwen3moe", **options: Any) -> LLM:
    return LLM(DATA / "models" / f"{name}.gguf", **options)


@pytest.fixture(scope="module")
def cpu() -> Iterator[LLM]:
    with open_model(devices="cpu", n_ctx=160) as llm:
        yield llm


@pytest.fixture(scope="module")
def spilling() -> Iterator[LLM]:
    with open_model(**SPILLING, policy="all") as llm:
        assert 0 < llm.host_expert_bytes < llm.plan.shape.total_bytes
        yield llm


@pytest.fixture(params=["cpu", "spilling"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm: LLM = request.getfixturevalue(request.param)
    return llm


def greedy(llm: LLM, ids: list[int]) -> list[int]:
    """24 tokens that no end token cuts short, as the oracles computed them."""
    with llm.submit(Request(f"greedy {id(ids)}", tuple(ids), GREEDY)) as events:
        return [event.token_id for event in events if isinstance(event, TokenEvent)]


def assert_as_both_oracles(logits: torch.Tensor, expected: dict[str, np.ndarray], prompt: int) -> None:
    for oracle in ("hf", "llamacpp"):
        np.testing.assert_allclose(logits, expected[f"{oracle}_logits_{prompt}"], rtol=0, atol=TOLERANCE)


# --- the oracles


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits(llm: LLM, oracle: dict[str, np.ndarray], prompt: int) -> None:
    logits = llm.logits(oracle[f"input_ids_{prompt}"].tolist())
    assert logits.dtype == torch.float32
    assert_as_both_oracles(logits, oracle, prompt)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_ids(llm: LLM, oracle: dict[str, np.ndarray], prompt: int) -> None:
    """The smallest gap between the first and the second choice is 0.003, a hundred times the error."""
    ids = greedy(llm, oracle[f"input_ids_{prompt}"].tolist())
    assert ids == oracle[f"hf_greedy_{prompt}"].tolist() == oracle[f"llamacpp_greedy_{prompt}"].tolist()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3moe"])
def test_other_models(name: str) -> None:
    """mixtral: devices too small for the experts. The dense ones have none: two devices share the layers."""
    memory = {"device_memory": "800KiB"} if name == "mixtral" else {}
    expected = oracle_of(name)
    with open_model(name, devices="virtual:2", n_ctx=160, n_ubatch=32, n_wave=96, **memory) as llm:
        assert (llm.host_expert_bytes > 0) == (name == "mixtral")
        for prompt in range(3):
            assert_as_both_oracles(llm.logits(expected[f"input_ids_{prompt}"].tolist()), expected, prompt)
        assert greedy(llm, expected["input_ids_0"].tolist()) == expected["llamacpp_greedy_0"].tolist()


def test_devices_change_no_bit(cpu: LLM, spilling: LLM, oracle: dict[str, np.ndarray]) -> None:
    """One ubatch of the same tokens: same sums in the same order, wherever they are computed."""
    ids = oracle["input_ids_0"].tolist()[:16]
    assert torch.equal(cpu.logits(ids), spilling.logits(ids))


# --- what was moved


@pytest.mark.parametrize(
    ("schedule", "per"), [("breadth-first", "waves"), ("depth-first", "ubatches"), ("serial", "ubatches")]
)
def test_uploads_are_what_the_schedule_promises(schedule: str, per: str, oracle: dict[str, np.ndarray]) -> None:
    with open_model(**SPILLING, schedule=schedule, policy="all") as llm:
        llm.logits(oracle["input_ids_1"].tolist())
        counters = llm.counters()
    n_ubatches, n_waves = -(-133 // 16), -(-133 // 64)
    assert (counters["waves"], counters["ubatches"], counters["tokens"]) == (n_waves, n_ubatches, 133)
    assert counters["host_expert_bytes"] > 0
    assert counters["uploaded_bytes"] == counters["host_expert_bytes"] * counters[per]
    assert counters["device_allocations_after_warmup"] == counters["device_syncs_after_warmup"] == 0
    assert counters["busy"].keys() == {"virtual:0", "virtual:1", "virtual:2"}
    assert all(0 < share <= 1 for share in counters["busy"].values())
    assert all(peak <= 800 * 1024 for peak in counters["peak_bytes"].values())


def test_cpu_policy_uploads_nothing(oracle: dict[str, np.ndarray]) -> None:
    with open_model(**SPILLING, policy="cpu") as llm:
        logits = llm.logits(oracle["input_ids_2"].tolist())
        assert llm.counters()["uploaded_bytes"] == 0
    assert_as_both_oracles(logits, oracle, 2)


def test_counters_begin_again(spilling: LLM) -> None:
    spilling.logits([1, 2, 3])
    assert spilling.counters()["tokens"] >= 3
    spilling.reset_counters()
    counters = spilling.counters()
    assert {name: counters[name] for name in ("waves", "ubatches", "tokens", "uploaded_bytes", "host_waits")} == {
        "waves": 0,
        "ubatches": 0,
        "tokens": 0,
        "uploaded_bytes": 0,
        "host_waits": 0,
    }


def test_trace_shows_every_stream_that_worked(spilling: LLM) -> None:
    n_before = spilling.counters()["uploaded_bytes"]
    spilling.start_trace()
    spilling.logits(list(range(40)))
    trace = spilling.take_trace()
    for name in ("virtual:0", "virtual:1", "virtual:2"):
        spans = trace[name]
        assert any(span.lane.value == "compute" for span in spans)
        assert all(span.start_us <= span.end_us for span in spans)
    uploads = [span for spans in trace.values() for span in spans if span.lane.value == "upload"]
    assert sum(span.n_bytes for span in uploads) == spilling.counters()["uploaded_bytes"] - n_before > 0


def test_progress_of_loading() -> None:
    seen: list[tuple[int, int]] = []
    with LLM(MODEL, devices="cpu", n_ctx=64, progress=lambda done, total: seen.append((done, total))) as llm:
        total = llm.plan.shape.total_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- text


def test_prompt_of_text(cpu: LLM) -> None:
    prompt = "Hello, world"
    ids = cpu.tokenizer.encode(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    by_text, by_ids = cpu.generate(prompt, params), cpu.generate(ids, params)
    assert by_text[:4] == by_ids[:4]
    assert by_text.n_prompt == len(ids)
    assert by_text.finish_reason == "length"
    assert by_text.text == cpu.tokenizer.decode(by_text.tokens)
    assert (by_text.timings.prompt_n, by_text.timings.predicted_n) == (len(ids), 8)
    assert by_ids.timings.cache_n + by_ids.timings.prompt_n == len(ids)


def test_prompt_is_tokenised_as_llama_cpp_does(cpu: LLM) -> None:
    record = SHARED / "models" / "qwen3moe.json"
    if not record.is_file():
        pytest.skip("the oracle's samples of tokenisation are not here")
    samples = json.loads(record.read_text())["tokenizer"]["llama_cpp_tokenize"]
    specials = [sample for sample in samples if sample["add_special"] and sample["parse_special"] and sample["ids"]]
    assert len(specials) > 2
    for sample in specials:
        assert cpu.tokenizer.encode(sample["text"]) == sample["ids"]
        assert cpu.generate(sample["text"], SamplingParams(max_tokens=0)).n_prompt == len(sample["ids"])


def test_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    whole = llm.generate("hello", params)
    stop = whole.text[6:9]
    assert whole.text.index(stop) == 6
    cut = llm.generate("hello", params, stop=["never said", stop])
    assert cut.text == whole.text[:6]
    assert cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert stop in llm.tokenizer.decode(cut.tokens)
    assert stop not in llm.tokenizer.decode(cut.tokens[:-1])
    assert cut.timings.predicted_n >= len(cut.tokens)
    assert cut.timings.predicted_per_second > 0


def test_end_token_ends_and_is_not_shown(cpu: LLM) -> None:
    eos_id = max(cpu.tokenizer.eos_ids)
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias=((eos_id, 1000.0),))
    completion = cpu.generate("hello", params)
    assert completion[:4] == ("", [eos_id], 1 if completion.n_prompt == 1 else completion.n_prompt, "stop")


@pytest.mark.parametrize("n", [0, 1, 5])
def test_max_tokens(cpu: LLM, n: int) -> None:
    completion = cpu.generate([1, 2, 3], SamplingParams(max_tokens=n, ignore_eos=True))
    assert len(completion.tokens) == n
    assert completion.finish_reason == "length"


def test_answer_ends_where_the_context_does(cpu: LLM) -> None:
    completion = cpu.generate([1] * 150, SamplingParams(temperature=0.0, ignore_eos=True))
    assert completion.finish_reason == "length"
    assert 160 - 150 <= len(completion.tokens) <= 160 - 150 + 1


def test_seed_decides_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=7, ignore_eos=True)
    first, again = llm.generate("hello", params), llm.generate("hello", params)
    other = llm.generate("hello", SamplingParams(temperature=1.5, max_tokens=12, seed=8, ignore_eos=True))
    assert first.tokens == again.tokens != other.tokens


def test_two_requests_at_once_get_the_answers_they_get_alone(oracle: dict[str, np.ndarray]) -> None:
    options = SPILLING | {"n_ctx": 320, "device_memory": "1MiB"}
    with open_model(**options, n_parallel=2) as llm:
        streams = [llm.submit(Request(f"{i}", tuple(oracle[f"input_ids_{i}"].tolist()), GREEDY)) for i in (0, 1)]
        answers = [[e.token_id for e in events if isinstance(e, TokenEvent)] for events in streams]
    assert answers == [oracle["llamacpp_greedy_0"].tolist(), oracle["llamacpp_greedy_1"].tolist()]


def test_cancelled_request_ends(cpu: LLM) -> None:
    events = cpu.submit(cpu.request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)))
    first = next(e for e in events if isinstance(e, TokenEvent))
    cpu.cancel(first.request_id)
    done = list(events)[-1]
    assert isinstance(done, DoneEvent)
    assert done.reason == "cancelled"


# --- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nctx": 5}, ["'nctx'", "n_ctx"]),
        ({"n_ctx": -1}, ["-c -1"]),
        ({"n_ctx": "many"}, ["-c many"]),
        ({"n_ctx": 1.5}, ["-c 1.5"]),
        ({"n_ctx": 1}, ["context per slot 1"]),
        ({"n_ctx": 1 << 40}, ["does not fit", "lower -c"]),
        ({"devices": ""}, ["-dev"]),
        ({"devices": "virtual:0"}, ["virtual:0"]),
        ({"devices": "tpu:1"}, ["tpu:1"]),
        ({"devices": "virtual:2", "device_memory": "12Q"}, ["--device-memory 12Q"]),
        ({"devices": "virtual:2", "device_memory": "1MiB,1MiB,1MiB"}, ["3 sizes for 2 devices"]),
        ({"devices": "virtual:2", "tensor_split": (1.0, 1.0, 1.0)}, ["-ts 1,1,1"]),
        ({"devices": "virtual:2", "override_tensor": "exps=virtual:7"}, ["virtual:7"]),
        ({"devices": "virtual:2", "split_mode": "none", "main_gpu": 5}, ["-mg 5"]),
        ({"schedule": "fast"}, ["--schedule fast", "breadth-first"]),
        ({"policy": "some"}, ["--policy some"]),
        ({"n_gpu_layers": "some"}, ["-ngl some"]),
        ({"n_ubatch": 64, "n_wave": 32}, ["-b 32", "-ub 64"]),
        ({"n_parallel": 100, "n_ctx": 50, "devices": "virtual:2"}, ["context per slot 0"]),
        ({"threads": 0}, ["-t 0"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_bad_option(options: dict[str, Any], words: list[str]) -> None:
    before = threading.active_count()
    with pytest.raises(UserError) as caught:
        open_model(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert threading.active_count() == before


def test_missing_file() -> None:
    with pytest.raises(UserError, match=r"nowhere\.gguf: cannot be opened"):
        LLM("nowhere.gguf")


def test_prompt_that_does_not_fit_says_both_numbers(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"170 tokens .*context of 160") as caught:
        llm.generate([1] * 170)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "0 tokens; give from 1 to the context, 160"),
        ([1] * 161, "161 tokens; give from 1 to the context, 160"),
        ([1, 512], "ids from 1 to 512; the model has 512"),
        ([-1, 5], "ids from -1 to 5; the model has 512"),
    ],
)
def test_bad_ids_for_logits_do_no_harm(llm: LLM, ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.logits(ids)
    assert llm.logits([1, 2]).shape == (2, 512)


@pytest.mark.parametrize("ids", [[], [512], [-1]])
def test_bad_ids_for_a_request_do_no_harm(cpu: LLM, ids: list[int]) -> None:
    with pytest.raises(UserError, match="prompt"):
        cpu.generate(ids)
    assert len(cpu.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)).tokens) == 2


def test_empty_stop_string_is_refused(cpu: LLM) -> None:
    with pytest.raises(UserError, match="empty string"):
        cpu.generate("hello", stop=[""])


# --- the end


def test_close_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    llm = open_model(**SPILLING)
    events = llm.submit(llm.request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)))
    next(events)
    assert set(threading.enumerate()) > before
    llm.close()
    llm.close()
    assert set(threading.enumerate()) == before
    done = list(events)[-1]
    assert isinstance(done, DoneEvent)
    assert done.reason == "cancelled"
    with pytest.raises(EngineStopped, match="shut down"):
        llm.generate([1])


def test_context_manager_closes_after_an_error() -> None:
    before = set(threading.enumerate())
    with pytest.raises(UserError), open_model(devices="virtual:2", n_ctx=64) as llm:
        llm.logits([])
    assert set(threading.enumerate()) == before
