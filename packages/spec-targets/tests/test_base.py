import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from spec_core import LoadError, Pair, StateError, generate
from spec_core.testing import ScriptedDrafter, check_target
from spec_targets import MlxTarget
from spec_targets.families import FAMILIES, StackFamily

PROMPT = [3, 14, 15, 9, 26, 5, 35]


def ids_of(rounds):
    return [token for round_ in rounds for token in round_.tokens]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_contract_holds_in_bfloat16(make_target, model_type):
    check_target(make_target(model_type, mx.bfloat16), prompt=PROMPT, taps=(1,), n_rounds=10)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_prefill_chunks_leave_the_answer_unchanged(make_target, model_type):
    target, prompt = make_target(model_type), PROMPT * 6
    want = ids_of(generate(Pair(target), prompt, max_tokens=8))
    for chunk in (1, 5, 16):
        assert ids_of(generate(Pair(target), prompt, max_tokens=8, prefill_chunk=chunk)) == want


def test_raw_ends_are_the_table_and_the_head(make_target, make_model):
    target, model = make_target("gemma3_text"), make_model("gemma3_text")
    ids = mx.array([4, 9])
    table = model.model.embed_tokens.weight
    assert mx.array_equal(target.embed(ids), table[ids])
    hidden = mx.random.normal((2, 32))
    assert mx.array_equal(target.unembed(hidden), model.lm_head(hidden))


def test_a_family_that_does_not_reproduce_the_model_is_refused(make_model):
    class Spoiled(StackFamily):
        def prepare(self, model):
            model.lm_head.weight = 2 * model.lm_head.weight

    with pytest.raises(LoadError, match='Family "llama" must reproduce the model\'s own logits'):
        MlxTarget(make_model("llama"), Spoiled(), "llama")


def test_taps_that_lead_elsewhere_refuse_drafters_but_not_the_target(make_model):
    class NoNorm(StackFamily):
        def norm(self, model, hidden):
            return hidden

    target = MlxTarget(make_model("llama"), NoNorm(), "llama")
    assert target.tap_refusal is not None and "layer 2" in target.tap_refusal


def test_a_layer_whose_output_is_not_what_enters_the_next_is_named(make_model):
    model = make_model("llama")

    class Doubling(type(model.model)):
        """The residual stream changes between layers 1 and 2, so a tap on 1 is not in it."""

        def __call__(self, inputs, cache, _):
            hidden = self.embed_tokens(inputs)
            mask = create_attention_mask(hidden, cache[0])
            for layer, entry in zip(self.layers, cache, strict=True):
                hidden = layer(hidden, mask, cache=entry)
                hidden = 2 * hidden if layer is self.layers[1] else hidden
            return self.norm(hidden)

    model.model.__class__ = Doubling
    target = MlxTarget(model, StackFamily(), "llama")
    assert target.tap_refusal == "the output of layer 1 is not what enters layer 2"
    # What reads no taps drafts as ever.
    want = ids_of(generate(Pair(target), PROMPT, max_tokens=12))
    drafter = ScriptedDrafter(want, len(PROMPT), target.vocab_size, wrong_at=(2,))
    assert ids_of(generate(Pair(target, drafter), PROMPT, max_tokens=12)) == want


def test_the_probe_of_all_layers_leaves_none_of_them_watched(make_model):
    model = make_model("llama")
    before = [type(layer) for layer in model.layers]
    target = MlxTarget(model, StackFamily(), "llama")
    assert target.tap_refusal is None
    assert [type(layer) for layer in model.layers] == before


def test_a_raw_head_that_leads_elsewhere_refuses_drafters_but_not_the_target(make_model):
    class Flipped(StackFamily):
        def raw_head(self, model, hidden):
            return -model.lm_head(hidden)

    target = MlxTarget(make_model("llama"), Flipped(), "llama")
    assert target.tap_refusal is not None and "raw head" in target.tap_refusal


def test_a_cache_kind_without_a_strategy_is_refused_by_name(make_model):
    class OddCache(KVCache):
        pass

    model = make_model("llama")

    class Odd(type(model)):
        def make_cache(self):
            return [OddCache() for _ in self.layers]

    model.__class__ = Odd
    with pytest.raises(LoadError, match='Layer 0 keeps a OddCache, which family "llama"'):
        MlxTarget(model, FAMILIES["llama"], "llama")


def test_open_blocks_are_guarded(make_target):
    target = make_target("llama")
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    target.verify(mx.array([1, 2, 3]), cache)
    with pytest.raises(Exception, match=r"\[verify\] A block of 3 rows is open"):
        target.verify(mx.array([1]), cache)
    with pytest.raises(Exception, match=r"\[prefill\] The open block must be committed first"):
        target.prefill([1], cache)
    with pytest.raises(
        ValueError, match=r"n_keep must be 0\.\.3 for the open block of 3 rows, got 4"
    ):
        target.commit(cache, 4)


@pytest.mark.parametrize("model_type", ["qwen3_5", "mamba2", "deepseek_v3", "gemma3_text"])
def test_a_failure_in_the_middle_of_a_verify_leaves_other_sequences_alone(make_target, model_type):
    target = make_target(model_type)
    want = ids_of(generate(Pair(target), PROMPT, max_tokens=12))
    last, broken = target.model.layers[-1], target.make_cache()
    target.prefill(PROMPT, broken)

    class Fails(type(last)):
        def __call__(self, *args, **kwargs):
            raise MemoryError("out of memory")

    last.__class__, works = Fails, last.__class__
    with pytest.raises(MemoryError):
        target.verify(mx.array([1, 2, 3]), broken, taps=(1,))
    last.__class__ = works
    assert ids_of(generate(Pair(target), PROMPT, max_tokens=12)) == want


def test_float32_on_this_cpu_is_exact_and_a_width_dependent_op_is_named(make_target, make_model):
    assert make_target("llama").exact_refusal is None

    target = make_target("llama")
    original = type(target.model.layers[0].mlp.down_proj)

    class Sloppy(original):
        def __call__(self, x):
            out = super().__call__(x)
            return out * (1 + 1e-6) if x.shape[-2] > 4 else out

    for layer in target.model.layers:
        layer.mlp.down_proj.__class__ = Sloppy
    refusal = target.exact_refusal
    assert refusal is not None and "matmul 48x32" in refusal and "at 5 rows" in refusal


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("step", ["prefill", "verify"])
def test_a_forward_that_breaks_off_leaves_a_cache_that_refuses(
    make_target, monkeypatch, model_type, step
):
    target = make_target(model_type)
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    mlp = type(target.model.layers[-1].mlp)
    calls, whole = [], mlp.__call__

    def interrupted(self, x):
        calls.append(self)
        if len(calls) == 2:  # the layers before have written their rows
            raise KeyboardInterrupt
        return whole(self, x)

    monkeypatch.setattr(mlp, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if step == "prefill":
            target.prefill([5, 6], cache)
        else:
            target.verify(mx.array([5, 6]), cache)
    monkeypatch.undo()
    for again in (
        lambda: target.prefill([5], cache),
        lambda: target.verify(mx.array([5]), cache),
        lambda: target.freeze(cache),
    ):
        with pytest.raises(StateError, match="Drop it and start from a new one"):
            again()
    assert ids_of(generate(Pair(target), PROMPT, max_tokens=3))  # the target itself is unharmed
