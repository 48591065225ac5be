"""What the OpenAPI document allows, and does not, tried by schemathesis: never a 5xx, and the server goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.served import Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
N_EXAMPLES = 10


def short(case: Any) -> None:
    """Answers of a few tokens; the limit itself is tried elsewhere."""
    if isinstance(case.body, dict) and ("prompt" in case.body or "messages" in case.body):
        case.body = {**case.body, "n_predict": 2, "max_tokens": 2}


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_is_a_server_error(served: Served, mode: GenerationMode) -> None:
    api = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    tried = set()
    for found in api.get_all_operations():
        operation = found.ok()
        tried.add(operation.path)
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing of it can be wrong

        @settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            short(case)
            case.call_and_validate(checks=[not_a_server_error], timeout=300)

        check()
    assert {"/completion", "/v1/chat/completions", "/v1/messages", "/tokenize", "/slots", "/metrics"} <= tried
    served.ask("/completion", prompt="a", n_predict=1)
    assert served.client.get("/health").status_code == 200
