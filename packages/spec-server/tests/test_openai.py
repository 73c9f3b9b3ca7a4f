"""The official client against a real socket."""

import json
import math

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from spec_core import Pair, generate
from spec_server import Server, Settings
from spec_targets import load_target

SCRIPTS = {
    "plain": "Hello there, friend.",
    "think": "<think>\nLet me see.\n</think>\n\nThe answer is 4.",
    "call": 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    "</tool_call>",
    "two": '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "broken": "<tool_call>{nope</tool_call> sorry",
    "umlaut": " \n  Zürich 🇨🇭 é 👨‍👩‍👧 fin",
    "both": '<think>hm</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "quoted": "Write `<tool_call>` and `<think>`, then it is done.",
    "space first": "\n <think>hm</think>\n\nThe answer is 4.",
    "stops": "one two three four five",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0)) as running:
        yield running


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server) as one:
        yield one


@pytest.fixture
def script(scripted):
    """Ask for a script; whole or streamed, the same dictionary comes back."""
    with client_of(scripted) as one:

        def ask(key, *, stream, **settings):
            settings = {
                "model": "m",
                "messages": [{"role": "user", "content": f"say:{key};"}],
                "temperature": 0,
                **settings,
            }
            if stream:
                return gathered(one.chat.completions.create(stream=True, **settings))
            return flattened(one.chat.completions.create(**settings))

        yield ask


def flattened(completion):
    choice = completion.choices[0]
    message = choice.message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    return {
        "text": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": calls,
        "reason": choice.finish_reason,
    }


def gathered(chunks):
    """What a client puts together, with the shape of the stream checked."""
    result = {"text": "", "reasoning": "", "calls": [], "reason": None}
    ids, created = set(), set()
    for chunk in chunks:
        ids.add(chunk.id)
        created.add(chunk.created)
        for choice in chunk.choices:
            assert result["reason"] is None, "a chunk after the terminal one"
            delta = choice.delta
            result["text"] += delta.content or ""
            result["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                assert call.index == len(result["calls"])
                result["calls"].append((call.function.name, call.function.arguments))
            result["reason"] = choice.finish_reason
    assert len(ids) == 1 and len(created) == 1
    return result


def ask(client, text="Name three rivers.", **settings):
    settings = {"max_tokens": 24, "temperature": 0, **settings}
    return client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}], **settings
    )


@pytest.fixture(scope="module")
def local(folder):
    """The same model without a server."""
    return load_target(folder)


def test_a_chat_equals_the_loop_without_a_server(client, local):
    target, tokenizer = local
    ids = tokenizer.encode_chat([{"role": "user", "content": "Name three rivers."}])
    rounds = list(generate(Pair(target, None, tokenizer), ids, max_tokens=24))
    answer = ask(client)
    assert answer.choices[0].message.content == "".join(r.text for r in rounds)
    assert answer.choices[0].finish_reason == rounds[-1].finish_reason
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == sum(len(r.tokens) for r in rounds)
    assert answer.model == "tiny"
    told = answer.x_spec
    assert told["mode"] == "lookup" and told["acceptance_length"] >= 1
    assert {"tokens_per_second", "time_to_first_token", "cached_tokens"} <= told.keys()


def test_speculation_off_gives_the_same_text_and_says_so(client):
    fast, plain = ask(client), ask(client, extra_body={"x_spec": {"max_draft": 0}})
    assert plain.choices[0].message.content == fast.choices[0].message.content
    assert plain.x_spec["mode"] == "baseline" and plain.x_spec["drafted_tokens"] == 0
    assert fast.x_spec["drafted_tokens"] > 0


def test_the_cap_that_held_is_told_and_one_too_large_is_cut_with_a_notice(client, load_tiny):
    def told(wish, one=client):
        extra = {} if wish is None else {"x_spec": {"max_draft": wish}}
        return ask(one, extra_body=extra).x_spec

    assert [told(wish)["max_draft"] for wish in (None, 0, 1, 4, 32)] == [4, 0, 1, 4, 32]
    assert "notices" not in told(32)
    large = told(33)
    assert large["max_draft"] == 32 and "max_draft 33 is cut" in large["notices"][0]
    with Server(load_tiny(drafts=False), Settings(port=0)) as running, client_of(running) as plain:
        assert told(None, plain)["max_draft"] == 0
        assert told(2, plain)["max_draft"] == 0 and "cut" in told(2, plain)["notices"][0]


@pytest.mark.parametrize("key", sorted(SCRIPTS))
@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_says_what_the_whole_answer_says(script, key, tools):
    settings = {"tools": TOOLS} if tools else {}
    whole, streamed = script(key, stream=False, **settings), script(key, stream=True, **settings)
    assert streamed == whole
    if key == "umlaut":
        assert whole["text"] == SCRIPTS[key]


def test_reasoning_is_split_from_the_answer(script):
    answer = script("think", stream=False)
    assert answer["reasoning"].strip() == "Let me see." and answer["text"] == "The answer is 4."


def test_calls_are_parsed_and_end_as_tool_calls(script):
    answer = script("call", stream=False, tools=TOOLS)
    assert answer["calls"] == [("get_weather", '{"city": "Paris"}')]
    assert answer["text"] == "Let me look." and answer["reason"] == "tool_calls"
    two = script("two", stream=False, tools=TOOLS)
    assert [name for name, _ in two["calls"]] == ["get_weather", "now"]
    assert two["calls"][1][1] == "{}"
    one = script("two", stream=True, tools=TOOLS, parallel_tool_calls=False)
    assert len(one["calls"]) == 1
    none = script("call", stream=False, tools=TOOLS, tool_choice="none")
    assert none["calls"] == [] and "<tool_call>" in none["text"] and none["reason"] == "stop"


def test_a_broken_call_stays_text_and_a_cut_one_is_no_call(script):
    broken = script("broken", stream=False, tools=TOOLS)
    assert broken["calls"] == [] and broken["text"] == SCRIPTS["broken"]
    assert broken["reason"] == "stop"
    for stream in (False, True):
        cut = script("two", stream=stream, tools=TOOLS, max_tokens=12)
        assert cut["calls"] == [] and cut["reason"] == "length"


def test_the_round_trip_of_a_call(scripted):
    with client_of(scripted) as client:
        messages = [{"role": "user", "content": "say:call;"}]
        first = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        call = first.choices[0].message.tool_calls[0]
        messages += [
            first.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            {"role": "user", "content": "say:plain;"},
        ]
        last = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert last.choices[0].message.content == SCRIPTS["plain"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("{}", 200), ("", 200), (None, 200), ({}, 200), ({"a": 1}, 200), ("null", 200),
     ("{", 400), ("[1]", 400), ([1], 400), ("[" * 3000, 400)],
)  # fmt: skip
def test_arguments_of_earlier_calls_never_break_the_server(server, arguments, status):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {
        "model": "m",
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "messages[1].tool_calls[0].function.arguments" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["three", ["ree fo"], "e f", ["zz", "two thr"], " five"])
def test_text_ends_just_before_a_stop(script, stop, stream):
    answer = script("stops", stream=stream, stop=stop)
    words = [stop] if isinstance(stop, str) else stop
    cut = min(SCRIPTS["stops"].find(s) for s in words if s in SCRIPTS["stops"])
    assert answer["text"] == SCRIPTS["stops"][:cut] and answer["reason"] == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6])
def test_exactly_so_many_tokens(client, max_tokens):
    for stream in (False, True):
        answer = ask(client, max_tokens=max_tokens, stream=stream, **(
            {"stream_options": {"include_usage": True}} if stream else {}))  # fmt: skip
        usage = [c.usage for c in answer if c.usage][0] if stream else answer.usage
        assert usage.completion_tokens == max_tokens


def test_logprobs_equal_plain_decodings(client, local):
    target, tokenizer = local
    ids = tokenizer.encode_chat([{"role": "user", "content": "Name three rivers."}])
    rounds = generate(Pair(target, None, tokenizer), ids, max_tokens=24, with_logits=True)
    want = []
    for round_ in rounds:
        for token, row in zip(round_.tokens, round_.logits.tolist(), strict=True):
            norm = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
            best = sorted(row, reverse=True)[:5]
            want.append((tokenizer.wrapper._tokenizer.decode([token]), row[token] - norm,
                         [x - norm for x in best]))  # fmt: skip
    for settings in ({}, {"extra_body": {"x_spec": {"max_draft": 0}}}):
        entries = ask(client, logprobs=True, top_logprobs=5, **settings).choices[0].logprobs.content
        assert [e.token for e in entries] == [token for token, _, _ in want]
        for entry, (_, logprob, best) in zip(entries, want, strict=True):
            assert entry.logprob <= 0 and abs(entry.logprob - logprob) < 1e-3
            got = [t.logprob for t in entry.top_logprobs]
            assert len(got) == 5 and all(abs(a - b) < 1e-3 for a, b in zip(got, best, strict=True))
    streamed = ask(client, logprobs=True, top_logprobs=5, stream=True)
    found = [e for c in streamed for ch in c.choices if ch.logprobs for e in ch.logprobs.content]
    assert [e.token for e in found] == [token for token, _, _ in want]


def test_logprobs_line_up_with_the_text_they_belong_to(script, scripted):
    with client_of(scripted) as client:
        for key, text in (
            ("think", "The answer is 4."),
            ("call", "Let me look."),
            ("broken", None),
            ("quoted", None),
            ("space first", "The answer is 4."),
            ("umlaut", None),
        ):
            answer = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"say:{key};"}],
                tools=TOOLS, logprobs=True, temperature=0,
            )  # fmt: skip
            entries = answer.choices[0].logprobs.content
            data = bytes(b for e in entries for b in e.bytes).decode()
            assert data == (text or SCRIPTS[key]) == answer.choices[0].message.content


def test_token_bytes_join_to_the_text(client):
    answer = ask(client, logprobs=True, max_tokens=20).choices[0]
    data = bytes(b for e in answer.logprobs.content for b in e.bytes)
    assert data.decode(errors="replace").startswith(answer.message.content[:4])


def test_seeds_repeat_alone_streamed_and_with_n(client):
    hot = {"temperature": 1.5, "seed": 7}
    first = ask(client, **hot).choices[0].message.content
    assert ask(client, **hot).choices[0].message.content == first
    assert gathered(ask(client, stream=True, **hot))["text"] == first
    assert ask(client, temperature=1.5, seed=8).choices[0].message.content != first
    three = ask(client, n=3, **hot).choices
    assert [c.index for c in three] == [0, 1, 2] and three[0].message.content == first
    assert len({c.message.content for c in three}) == 3
    assert (
        three[1].message.content == ask(client, temperature=1.5, seed=8).choices[0].message.content
    )
    texts = {ask(client, temperature=1.5).choices[0].message.content for _ in range(4)}
    assert len(texts) > 1


def test_parameters_change_what_they_name(client, local):
    _, tokenizer = local
    plain = ask(client).choices[0].message.content
    first = ask(client, max_tokens=1, logprobs=True).choices[0].logprobs.content[0].token
    token = tokenizer.wrapper._tokenizer.convert_tokens_to_ids(
        tokenizer.wrapper._tokenizer.tokenize(first)[0]
    )
    assert ask(client, logit_bias={str(token): -100}).choices[0].message.content != plain
    assert ask(client, logit_bias={str(token): 100}, max_tokens=4).choices[0].message.content == (
        first * 4
    )
    top_k = {"extra_body": {"top_k": 1}, "temperature": 2}
    assert ask(client, **top_k).choices[0].message.content == plain
    assert ask(client, top_p=1e-6, temperature=2).choices[0].message.content == plain
    min_p = ask(client, temperature=2, extra_body={"min_p": 0.999})
    assert min_p.choices[0].message.content == plain
    for penalty in ("frequency_penalty", "presence_penalty"):
        varied = ask(client, max_tokens=40, logprobs=True, **{penalty: 50})
        tokens = [tuple(entry.bytes) for entry in varied.choices[0].logprobs.content]
        assert len(set(tokens)) == len(tokens)
    strong = ask(client, max_tokens=40, extra_body={"repetition_penalty": 50.0})
    assert (
        strong.choices[0].message.content != ask(client, max_tokens=40).choices[0].message.content
    )
    assert ask(client, max_completion_tokens=3).usage.completion_tokens == 3


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("max_draft", [0, 4])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_structured_output_holds_with_and_without_speculation(client, max_draft, temperature):
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = ask(
        client, response_format=shape, temperature=temperature, seed=3, max_tokens=200,
        extra_body={"x_spec": {"max_draft": max_draft}},
        logit_bias={str(i): -100 for i in range(220, 224)},
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        found = json.loads(answer.choices[0].message.content)
        assert found["kind"] in ("cat", "dog") and isinstance(found["n"], int)
    else:  # a random model may pad past the limit; what is there must still fit
        assert answer.choices[0].message.content.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize("tools", [openai.NOT_GIVEN, TOOLS])
def test_a_model_that_would_pad_json_for_ever_comes_to_its_end(client, folder, tools):
    """As one does that has closed a text too early: vllm-project/vllm#38696."""
    vocab = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    biases = {str(vocab["Ċ"]): 100, str(vocab["<tool_call>"]): -100}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = ask(client, response_format=shape, max_tokens=700, logit_bias=biases, tools=tools)
    assert answer.choices[0].finish_reason == "stop"
    text = answer.choices[0].message.content
    assert json.loads(text)["kind"] in ("cat", "dog") and "\n" * 30 in text


def test_structured_output_is_the_same_under_speculation(client):
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    texts = {
        ask(client, response_format=shape, max_tokens=60, extra_body={"x_spec": {"max_draft": n}})
        .choices[0].message.content
        for n in (0, 1, 4)
    }  # fmt: skip
    assert len(texts) == 1


def test_any_object_is_one(scripted):
    with client_of(scripted) as client:
        any_object = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "say:plain;"}], max_tokens=4,
            response_format={"type": "json_object"}, temperature=0,
        )  # fmt: skip
        assert any_object.choices[0].message.content.lstrip().startswith("{")


def test_completions_take_texts_ids_and_lists(client, local):
    _, tokenizer = local
    common = {"model": "m", "max_tokens": 6, "temperature": 0}
    text = "The quick brown"
    one = client.completions.create(prompt=text, **common)
    ids = tokenizer.encode(text)
    assert client.completions.create(prompt=ids, **common).choices[0].text == one.choices[0].text
    many = client.completions.create(prompt=[text, "Name three", text], **common)
    assert [c.index for c in many.choices] == [0, 1, 2]
    assert many.choices[0].text == many.choices[2].text == one.choices[0].text
    lists = client.completions.create(prompt=[ids, tokenizer.encode("Name three")], **common)
    assert [c.text for c in lists.choices] == [c.text for c in many.choices[:2]]
    assert many.usage.prompt_tokens == 2 * len(ids) + len(tokenizer.encode("Name three"))
    default = client.completions.create(model="m", prompt=text, temperature=0)
    assert default.usage.completion_tokens == 16
    streamed = list(client.completions.create(prompt=text, stream=True, **common))
    assert "".join(c.choices[0].text for c in streamed if c.choices) == one.choices[0].text


def test_completions_have_their_own_logprobs(client):
    answer = client.completions.create(
        model="m", prompt="The quick", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    logprobs = answer.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(len(top) <= 2 for top in logprobs.top_logprobs) and logprobs.text_offset[0] == 0


def test_the_model_list(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match='No model "gpt"'):
        client.models.retrieve("gpt")


@pytest.mark.parametrize("over", [0, 1, 3000])
def test_a_prompt_beyond_the_context_is_refused_in_words_clients_know(client, context, over):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt=[5] * (context + over), max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert f"maximum context length is {context} tokens" in refused.value.message
    fits = client.completions.create(model="m", prompt=[5] * (context - 1), max_tokens=50)
    assert fits.usage.completion_tokens == 1 and fits.choices[0].finish_reason == "length"


def test_a_server_without_a_drafter_says_baseline(load_tiny):
    with Server(load_tiny(drafts=False), Settings(port=0)) as running:
        with client_of(running) as client:
            assert ask(client).x_spec["mode"] == "baseline"
