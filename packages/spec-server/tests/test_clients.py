"""Requests that agent clients really sent, shortened: each is answered, streamed as it asks."""

import json
from pathlib import Path

import httpx
import pytest

from spec_server import Server, Settings

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.json"))
SCRIPTS = {"plain": "Hello there, friend."}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0, prefix_bytes=0)) as running:
        yield running


def recorded(name):
    return json.loads((Path(__file__).parent / "requests" / f"{name}.json").read_text())


def text_of(answer):
    """The text of a streamed answer, in any dialect."""
    lines = [x[6:] for x in answer.text.splitlines() if x.startswith("data: {")]
    text = ""
    for event in map(json.loads, lines):
        delta = event.get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_what_clients_send_is_answered(scripted, path):
    request = json.loads(path.read_text())
    answer = httpx.post(f"{scripted.url}{request['path']}", json=request["body"])
    assert answer.status_code == 200, answer.text
    if "count_tokens" in request["path"]:
        assert answer.json()["input_tokens"] > 10
    elif "response_format" not in request["body"]:  # the script knows no shape
        assert text_of(answer) == SCRIPTS["plain"]


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("claude-code-search", ("web_search",)),
        ("codex", ("namespace", "web_search")),
        ("codex-known-model", ("custom", "tool_search", "web_search", "verbosity")),
    ],
)
def test_what_is_left_out_of_them_is_told(scripted, name, left_out):
    request = recorded(name)
    answer = httpx.post(f"{scripted.url}{request['path']}", json=request["body"]).text
    notices = answer[answer.rindex('"notices"') :]
    assert all(word in notices for word in left_out), notices


def test_an_image_is_refused_by_the_place_that_clients_look_for(scripted):
    request = recorded("claude-code")
    result = request["body"]["messages"][-1]["content"][0]
    for content, place in (
        ({**result, "content": [IMAGE]}, "content.0.tool_result.content.0.image: "),
        (IMAGE, "content.0.image: "),
    ):
        request["body"]["messages"][-1]["content"] = [content]
        answer = httpx.post(f"{scripted.url}{request['path']}", json=request["body"])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"messages.3.{place}")


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_tool_uses_20250919"},
    ],
)
def test_edits_of_the_conversation_are_refused_by_name(scripted, edit):
    body = {**recorded("claude-code")["body"], "context_management": {"edits": [edit]}}
    answer = httpx.post(f"{scripted.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert "context_management.edits[0]" in answer.json()["error"]["message"]


def test_a_shape_may_stand_in_its_older_place(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    shape = {"type": "json_schema", "schema": schema}
    body = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0, "output_format": shape}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/messages", json=body).json()
    assert answer["content"][0]["text"].lstrip()[:1] == "{"
    body["output_config"] = {"format": shape}
    assert "output_format" in httpx.post(f"{server.url}/v1/messages", json=body).text


def test_the_billing_line_of_claude_code_does_not_keep_prompts_apart(load_script):
    """It changes with every request: anthropics/claude-code#68900."""
    body = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "say:plain;"}]}
    line = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={};"
    rules = "You are a careful agent. " * 20
    counts = set()
    with Server(load_script(SCRIPTS), Settings(port=0, prefix_bytes=0)) as server:
        for system in (
            rules,
            [{"type": "text", "text": line.format("36ee5")}, {"type": "text", "text": rules}],
            [{"type": "text", "text": line.format("0aaa9f")}, {"type": "text", "text": rules}],
            f"{line.format('1')}\n{rules}",
        ):
            answer = httpx.post(f"{server.url}/v1/messages", json={**body, "system": system}).json()
            assert answer["content"][0]["text"] == SCRIPTS["plain"]
            counts.add(answer["usage"]["input_tokens"])
        alone = {**body, "system": [{"type": "text", "text": line.format("2")}]}
        none = httpx.post(f"{server.url}/v1/messages", json=alone).json()["usage"]["input_tokens"]
        quoted = {**body, "system": f"Never repeat this: {line}"}
        kept = httpx.post(f"{server.url}/v1/messages", json=quoted).json()["usage"]["input_tokens"]
    assert len(counts) == 1 and none < min(counts) and kept > none + 20
