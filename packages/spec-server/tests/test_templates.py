"""Chat templates that open the reasoning, or leave the start token to the tokenizer."""

import json
import shutil

import httpx
import pytest
from tokenizers import Tokenizer, processors

from spec_server import Server, Settings

SCRIPTS = {"a": "The answer is 4."}


@pytest.fixture
def with_template(folder, tmp_path):
    """The tiny checkpoint with its chat template changed: `with_template(old, new)`."""

    def make(*change: str, **tokenizer):
        path = tmp_path / "changed"
        shutil.copytree(folder, path, dirs_exist_ok=True)
        config, template = path / "tokenizer_config.json", path / "chat_template.jinja"
        settings = json.loads(config.read_text())
        text = template.read_text() if template.is_file() else settings["chat_template"]
        for old, new in zip(change[::2], change[1::2], strict=True):
            assert old in text
            text = text.replace(old, new, 1)
        template.unlink(missing_ok=True)
        config.write_text(json.dumps({**settings, "chat_template": text, **tokenizer}))
        return path

    return make


def post(server, route, **body):
    answer = httpx.post(f"{server.url}{route}", json={"model": "m", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def test_reasoning_that_the_template_always_opens_can_be_turned_off(with_template, load_script):
    path = with_template(
        "<|im_start|>assistant\n{% if", "<|im_start|>assistant\n<think>\n{% if false and",
    )  # fmt: skip
    with Server(load_script(SCRIPTS, path), Settings(port=0)) as server:
        messages = [{"role": "user", "content": "say:a;"}]
        left = post(server, CHAT, messages=messages)["choices"][0]["message"]
        assert left["reasoning_content"] == SCRIPTS["a"] and not left["content"]
        for off in (
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            answer = post(server, CHAT, messages=messages, **off)["choices"][0]["message"]
            assert answer["content"] == SCRIPTS["a"] and "reasoning_content" not in answer
        off = {"max_tokens": 50, "thinking": {"type": "disabled"}}
        (block,) = post(server, MESSAGES, messages=messages, **off)["content"]
        assert block == {"type": "text", "text": SCRIPTS["a"]}
        (item,) = post(server, RESPONSES, input="say:a;", reasoning={"effort": "none"})["output"]
        assert item["type"] == "message" and item["content"][0]["text"] == SCRIPTS["a"]


class Seen:
    """A target that notes its prompts."""

    def __init__(self, target):
        self._target, self.prompts = target, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, tokens, *args, **kwargs):
        self.prompts.append(list(tokens))
        return self._target.prefill(tokens, *args, **kwargs)


@pytest.mark.parametrize("written", [True, False])
def test_the_start_token_comes_once_on_every_route(with_template, load_tiny, written):
    start, head = "<|endoftext|>", "{% for m in messages %}"
    path = with_template(*((head, start + head) if written else ()), bos_token=start)
    raw = Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, raw.token_to_id(start))]
    )
    raw.save(str(path / "tokenizer.json"))
    settings = Settings(port=0, prefix_bytes=0)
    with Server(load_tiny(path=path, wrap=Seen), settings) as server:
        prompts = server.engine.served.pair.target.prompts
        prompts.clear()
        chat = [{"role": "user", "content": "hi"}]
        used = [
            post(server, CHAT, messages=chat, max_tokens=1)["usage"]["prompt_tokens"],
            post(server, MESSAGES, messages=chat, max_tokens=1)["usage"]["input_tokens"],
            post(server, RESPONSES, input="hi", max_output_tokens=1)["usage"]["input_tokens"],
        ]
        count = httpx.post(
            f"{server.url}{MESSAGES}/count_tokens", json={"model": "m", "messages": chat}
        ).json()
        assert set(used) == {count["input_tokens"]}
        for prompt in ("hi", f"{start}hi"):
            post(server, "/v1/completions", prompt=prompt, max_tokens=1)
        assert [p.count(raw.token_to_id(start)) for p in prompts] == [1] * 5
        assert all(p[0] == raw.token_to_id(start) for p in prompts)


def test_variables_of_the_template_reach_it_and_others_are_refused(with_template, load_script):
    """As `preserve_thinking` of Qwen 3.6: QwenLM/Qwen3.8#112, ml-explore/mlx-lm#1803."""
    path = with_template(
        "{% if add_generation_prompt %}",
        "{% if preserve_thinking %}KEEP {{ tone }}{% endif %}{% if add_generation_prompt %}",
    )
    messages = [{"role": "user", "content": "say:a;"}]
    with Server(load_script(SCRIPTS, path), Settings(port=0)) as server:

        def count(**variables):
            answer = post(server, CHAT, messages=messages, chat_template_kwargs=variables)
            assert answer["choices"][0]["message"]["content"] == SCRIPTS["a"]
            return answer["usage"]["prompt_tokens"]

        plain = count()
        assert count(preserve_thinking=False) == count(tone=None) == plain
        assert plain < count(preserve_thinking=True) < count(preserve_thinking=True, tone="dry")
        assert count(preserve_thinking=True, enable_thinking=False) > count(preserve_thinking=True)
        for wrong in (
            {"thinking_mode": "on"}, {"messages": "x"}, {"add_generation_prompt": False},
            {"a.b": 1}, {"": 1}, {"tone": ["dry"]}, {"enable_thinking": "no"},
        ):  # fmt: skip
            body = {"model": "m", "messages": messages, "chat_template_kwargs": wrong}
            answer = httpx.post(f"{server.url}{CHAT}", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"].startswith("chat_template_kwargs")
