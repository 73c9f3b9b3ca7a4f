"""Generated requests against the server's own description of itself."""

from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens",
)  # fmt: skip


def bounded(body):
    """The same request with few tokens and few answers, so that the run stays short."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 4:
            body[name] = 4
    if isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2
    if not any(name in body for name in ("max_tokens", "max_output_tokens")):
        body["max_output_tokens" if "input" in body else "max_tokens"] = 4
    return body


@pytest.mark.parametrize("n", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("route", ROUTES)
def test_no_generated_request_is_answered_with_a_server_error(server, route, mode, n):
    document = httpx.get(f"{server.url}/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[route]["POST"]
    codes: Counter[int] = Counter()

    @settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.body = bounded(case.body)
        answer = case.call(base_url=server.url, timeout=20)
        codes[answer.status_code] += 1
        case.validate_response(answer, checks=[not_a_server_error])

    check()
    assert sum(codes.values()) >= n // 2 and set(codes) <= {200, 400, 404, 405, 413, 429}
    if mode is GenerationMode.NEGATIVE:
        assert codes[400] > n // 6
