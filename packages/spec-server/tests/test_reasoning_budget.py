"""`thinking.budget_tokens` is kept, and changes nothing else."""

import json

import anthropic
import httpx
import pytest

from spec_server import Server, Settings
from spec_server.guides import BudgetGuide
from spec_server.jobs import Budget

OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SCRIPTS = {"think": "<think>one two three four five six</think>The answer is 4."}


@pytest.fixture(scope="module")
def thinking(load_other):
    """A random model whose template opens the reasoning."""
    with Server(load_other(template=OPENED), Settings(port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0)) as running:
        yield running


def ask(server, budget, text="Go.", max_tokens=60, **more):
    thinking = {"type": "enabled"} | ({"budget_tokens": budget} if budget else {})
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        return client.messages.create(
            model="m", max_tokens=max_tokens, messages=[{"role": "user", "content": text}],
            extra_body={"thinking": thinking, "temperature": 0, **more},
        )  # fmt: skip


def parts(answer):
    texts = {"thinking": "", "text": ""}
    for block in answer.content:
        texts[block.type] += getattr(block, block.type)
    return texts["thinking"], texts["text"]


@pytest.mark.parametrize("budget", [1, 7, 30])
def test_reasoning_ends_when_its_tokens_are_spent(thinking, budget):
    free = ask(thinking, None)
    free_thought, free_text = parts(free)
    assert free_text == "" and free.usage.output_tokens == 60  # it would ramble on
    drafted, plain = (
        ask(thinking, budget, x_spec={"max_draft": n}) for n in (4, 0)
    )  # fmt: skip
    thought, text = parts(drafted)
    assert parts(plain) == (thought, text)
    assert free_thought.startswith(thought.rstrip("\N{REPLACEMENT CHARACTER}")) and text
    assert drafted.usage.output_tokens == 60
    spent, _ = parts(ask(thinking, None, max_tokens=budget))
    assert spent == thought and parts(ask(thinking, budget, max_tokens=budget + 1)) == (spent, "")


def test_a_budget_that_is_not_reached_changes_nothing(thinking):
    assert parts(ask(thinking, 5000)) == parts(ask(thinking, None))


def test_reasoning_that_the_answer_opens_itself_is_counted_too(scripted):
    text = "say:think;"
    assert parts(ask(scripted, None, text)) == ("one two three four five six", "The answer is 4.")
    encode = scripted.engine.served.pair.tokenizer.encode
    budget = len(encode("one two"))
    thought, rest = parts(ask(scripted, budget, text))
    assert thought == "one two" and rest.endswith("The answer is 4.")
    enough = ask(scripted, len(encode("one two three four five six")) + 1, text)
    assert parts(enough) == ("one two three four five six", "The answer is 4.")


def test_a_budget_holds_beside_a_grammar(thinking):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    thought, text = parts(ask(thinking, 5, output_config=config))
    assert thought and json.loads(text) == {"a": "x"}


def test_what_a_budget_cannot_mean_is_refused_or_said(thinking, load_other):
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    wrong = {**body, "thinking": {"type": "disabled", "budget_tokens": 2000}}
    refused = httpx.post(f"{thinking.url}/v1/messages", json=wrong)
    assert refused.status_code == 400 and "thinking.budget_tokens" in refused.text
    with Server(load_other(marks=["[OTHER]"]), Settings(port=0)) as server:
        wish = {**body, "thinking": {"type": "enabled", "budget_tokens": 2000}}
        told = httpx.post(f"{server.url}/v1/messages", json=wish).json()
        assert "does not reason" in told["x_spec"]["notices"][0]


def test_marks_of_several_tokens_are_followed_draft_by_draft():
    guide = BudgetGuide(Budget(2, (1, 2), (3, 4), False), 8)

    def choices(drafts):
        rows = guide.bias(drafts).tolist()
        return [{i for i, bias in enumerate(row) if bias == 0} for row in rows]

    everything = set(range(8))
    assert choices([1, 2, 5, 6, 3, 4, 7]) == [everything] * 4 + [{3}, {4}] + [everything] * 2
    assert choices([1, 2, 5, 6, 7, 7]) == [everything] * 4 + [{3}] + [everything] * 2
    assert choices([5, 1, 2, 5, 6, 7]) == [everything] * 7  # it does not reason
    guide.advance([1, 2, 5, 3])
    assert choices([4]) == [{3}, everything]  # a mark begun by the text itself is begun again
    guide.advance([3])
    assert choices([4, 0]) == [{4}, everything, everything]
    closing = BudgetGuide(Budget(9, (), (3, 4), True), 8)
    closing.advance([5, 3, 4, 6, 6, 6, 6, 6, 6, 6])
    assert closing.bias([]).max().item() == closing.bias([]).min().item() == 0
