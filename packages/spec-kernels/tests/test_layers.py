"""Wrapping and unwrapping layers of one instance, with stand-ins for the kernels."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_kernels import ExactError, KernelError
from spec_kernels.attention_layers import AttentionKernel, attention_function, wrap_attention
from spec_kernels.layers import LinearKernel, Shared, Switch, unwrap, weight_of, wrap_linear
from spec_kernels.matmul import RowMatmul, stock_matmul


class FakeMatmul(RowMatmul):
    """Stands in for the bound kernel: right results, and a note of the rows it was given."""

    def __init__(self, *weights):
        self.weights = weights
        self.dtype, self.n = weights[0].dtype, weights[0].n
        self.rows = []

    def bound(self, shape):
        return self.multiply, True

    def multiply(self, x, **others):
        self.rows.append(x.size // x.shape[-1])
        return [stock_matmul(x, weight) for weight in self.weights]


def attend(queries, keys, values, cache, scale, mask, sinks=None):
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


class Attention(nn.Module):
    """An attention layer written as model code is: by the name of a module-level function."""

    def __call__(self, q, k, v, mask=None):
        return attend(q, k, v, cache=None, scale=0.125, mask=mask)


def wrapped(layer, *, rows=range(1, 17), wide_from=None, exact=False):
    matmul = FakeMatmul(weight_of(layer))
    switch = Switch(16, exact=exact)
    kernel = LinearKernel(matmul, frozenset(rows), wide_from, switch, "cuda")
    wrap_linear(layer, kernel)
    return matmul, switch


def linear(bits=4, bias=True, dtype=mx.float32):
    layer = nn.Linear(128, 64, bias=bias)
    layer.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(layer, 64, bits) if bits != 16 else layer


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_wrapped_layer_computes_what_it_did_before(bits, bias):
    layer = linear(bits, bias)
    x = mx.random.normal((1, 5, 128), key=mx.random.key(0))
    before = layer(x)
    matmul, switch = wrapped(layer)
    assert mx.allclose(layer(x), before, rtol=1e-5, atol=1e-6)
    assert matmul.rows == [5]
    assert switch.calls == {"matmul cuda": 1}


def test_only_this_instance_changes_and_unwrapping_restores_it():
    layer, other = linear(), linear()
    names = sorted(layer.parameters())
    wrapped(layer)
    assert isinstance(layer, nn.QuantizedLinear) and type(layer).__name__ == "QuantizedLinear"
    assert type(layer) is not nn.QuantizedLinear and type(other) is nn.QuantizedLinear
    assert sorted(layer.parameters()) == names
    unwrap(layer)
    assert type(layer) is nn.QuantizedLinear
    assert "_spec_kernel" not in vars(layer)


def test_rows_the_kernel_does_not_serve_stay_stock():
    layer = linear()
    matmul, switch = wrapped(layer, rows=range(5, 17))
    layer(mx.zeros((1, 4, 128)))
    layer(mx.zeros((1, 5, 128)))
    layer(mx.zeros((1, 17, 128)))
    assert matmul.rows == [5]
    assert switch.calls == {"matmul cuda": 1}


def test_many_rows_take_wide_prefill_from_its_crossover():
    layer = linear()
    x = mx.random.normal((1, 300, 128), key=mx.random.key(1))
    before = layer(x)
    _, switch = wrapped(layer, wide_from=256)
    assert mx.allclose(layer(x), before, rtol=1e-4, atol=1e-5)
    layer(x[:, :255])
    assert switch.calls == {"matmul wide": 1}


def test_the_switch_sends_everything_to_stock():
    layer = linear()
    matmul, switch = wrapped(layer)
    switch.turn_off("tried")
    layer(mx.zeros((1, 4, 128)))
    assert matmul.rows == []


def test_an_exact_batch_goes_sixteen_rows_at_a_time():
    layer = linear()
    x = mx.random.normal((5, 7, 128), key=mx.random.key(2))
    before = layer(x)
    matmul, _ = wrapped(layer, exact=True)
    assert mx.allclose(layer(x), before, rtol=1e-5, atol=1e-6)
    assert matmul.rows == [16, 16, 3]


def siblings():
    layers = [linear(bias=False) for _ in range(3)]
    wants = [weight_of(layer) for layer in layers]
    kernels = [wrapped(layer) for layer in layers]
    together = FakeMatmul(*wants)
    shared = Shared(together)
    for index, layer in enumerate(layers):
        layer._spec_kernel.share(shared, index, True)
    return layers, together, [matmul for matmul, _ in kernels]


def test_siblings_called_with_one_input_share_one_launch():
    layers, together, alone = siblings()
    x = mx.random.normal((1, 3, 128), key=mx.random.key(6))
    wants = [stock_matmul(x, weight_of(layer)) for layer in layers]
    for _ in range(2):
        for layer, want in zip(layers, wants, strict=True):
            assert mx.array_equal(layer(x), want)
    assert together.rows == [3, 3]
    assert all(matmul.rows == [] for matmul in alone)


def test_siblings_called_with_other_inputs_or_twice_stay_right():
    layers, together, _ = siblings()
    x, y = (mx.random.normal((1, 2, 128), key=mx.random.key(k)) for k in (7, 8))
    for layer, value in ((layers[0], x), (layers[1], y), (layers[1], y), (layers[2], x)):
        assert mx.array_equal(layer(value), stock_matmul(value, weight_of(layer)))
    assert len(together.rows) == 4


def test_an_exact_layer_refuses_another_dtype_and_a_switch_that_is_off():
    layer = linear(dtype=mx.float16)
    _, switch = wrapped(layer, exact=True)
    with pytest.raises(
        ExactError, match=r"\[exact\] matmul must use its kernel, got mlx.core.float32"
    ):
        layer(mx.zeros((1, 4, 128), mx.float32))
    layer(mx.zeros((1, 40, 128), mx.float16))
    switch.turn_off("a stall")
    with pytest.raises(ExactError, match="got off: a stall"):
        layer(mx.zeros((1, 4, 128), mx.float16))


def test_a_tied_embedding_keeps_its_lookup_and_wraps_its_head():
    layer = nn.QuantizedEmbedding.from_embedding(nn.Embedding(64, 128), 64, 4)
    ids, x = mx.array([[3, 5]]), mx.random.normal((1, 2, 128), key=mx.random.key(3))
    rows, head = layer(ids), layer.as_linear(x)
    matmul, _ = wrapped(layer)
    assert mx.array_equal(layer(ids), rows)
    assert mx.allclose(layer.as_linear(x), head, rtol=1e-5, atol=1e-6)
    assert matmul.rows == [2]


def attention_problem(queries):
    q = mx.random.normal((1, 4, queries, 64), key=mx.random.key(4)).astype(mx.float16)
    k = mx.random.normal((1, 2, 40, 64), key=mx.random.key(5)).astype(mx.float16)
    return q, k


def test_attention_finds_the_kernel_in_this_instance_only(monkeypatch):
    layer, other = Attention(), Attention()
    original = attention_function(layer, "attend")
    assert original is attend and original is not None
    served = []
    switch = Switch(16)
    kernel = AttentionKernel(original, {4: 1}, switch, "cuda")

    def bound(self, q, k, causal):
        def attend(q, k, v):
            served.append((q.shape[2], causal))
            return q

        return attend

    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", bound)
    wrap_attention(layer, "attend", kernel)
    q, k = attention_problem(4)
    assert layer(q, k, k, "causal") is q
    assert mx.array_equal(other(q, k, k, "causal"), attend(q, k, k, None, 0.125, "causal"))
    assert served == [(4, True)]
    unwrap(layer)
    assert type(layer) is Attention


def test_attention_served_once_is_still_asked_what_may_change(monkeypatch):
    monkeypatch.setattr(
        "spec_kernels.attention_layers.RowAttention.bound",
        lambda self, q, k, causal: lambda q, k, v: q,
    )
    switch = Switch(16)
    kernel = AttentionKernel(attend, {4: 40}, switch, "metal")
    q, k = attention_problem(4)

    def served(q=q, k=k, **settings):
        return kernel(q, k, k, cache=None, scale=0.125, **{"mask": "causal", **settings}) is q

    assert served() and served() and switch.calls == {"attention metal": 2}
    assert not served(k=k[:, :, 1:])
    assert not served(q=q.astype(mx.float32), k=k.astype(mx.float32))
    assert not served(mask=mx.ones((4, 40), mx.bool_))
    assert not served(sinks=mx.zeros(q.shape[1], q.dtype))
    assert served()
    switch.turn_off("tried")
    assert not served()


@pytest.mark.parametrize(
    ("queries", "mask", "min_keys"),
    [(4, "causal", {4: 64}), (4, "causal", {2: 1}), (4, "bool", {4: 1})],
)
def test_attention_the_kernel_does_not_serve_is_the_models_own(queries, mask, min_keys):
    switch = Switch(16)
    kernel = AttentionKernel(attend, min_keys, switch, "metal" if mask == "bool" else "cuda")
    q, k = attention_problem(queries)
    mask = mx.ones((queries, 40), mx.bool_) if mask == "bool" else mask
    out = kernel(q, k, k, cache=None, scale=0.125, mask=mask)
    assert mx.array_equal(out, attend(q, k, k, None, 0.125, mask))
    assert switch.calls == {}


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "by head"])
def test_on_cuda_a_few_queries_without_a_kernel_go_to_plain_operations(kind):
    """MLX would hand them to cuDNN, which plans anew for every length of the cache."""
    q, k = (x[..., :32] for x in attention_problem(5))
    seen = mx.random.uniform(shape=(q.shape[1], 5, 40), key=mx.random.key(3)) > 0.3
    mask = {
        "none": None,
        "causal": "causal",
        "bool": seen[0],
        "added": mx.where(seen[0], 0.0, -9.0).astype(q.dtype),
        "by head": seen[None],
    }[kind]
    switch = Switch(16)
    out = AttentionKernel(attend, {}, switch, "cuda", raced=False)(q, k, k, mask=mask)
    assert switch.calls == {"attention plain": 1}
    exact = mask.astype(mx.float32) if kind == "added" else mask
    want = attend(q.astype(mx.float32), *[k.astype(mx.float32)] * 2, None, 1.0, exact)
    assert out.dtype == q.dtype
    assert mx.abs(out.astype(mx.float32) - want).max() < 0.03


@pytest.mark.parametrize(
    ("queries", "scores", "mask", "taken"),
    [
        (33, 33 * 40, "causal", True),  # a short prompt
        (33, 33 * 40 - 1, "causal", False),  # a long one
        (32, 1, "causal", True),
        (1, 10**9, None, False),  # MLX has a kernel of its own for it
        (1, 1, "rows", True),  # unless sequences of a batch differ in length
    ],
)
def test_prompts_worth_a_plan_and_single_queries_stay_with_mlx(
    monkeypatch, queries, scores, mask, taken
):
    monkeypatch.setattr("spec_kernels.attention_layers._FEW_SCORES", scores)
    q, k = attention_problem(queries)
    mask = mx.ones((queries, 40), mx.bool_) if mask == "rows" else mask
    switch = Switch(16)
    AttentionKernel(attend, {}, switch, "cuda", raced=False)(q, k, k, mask=mask)
    assert switch.calls == ({"attention plain": 1} if taken else {})


def test_whole_buffers_go_to_the_kernel_with_what_is_fresh(monkeypatch):
    """Bound once for a shape; what it cannot read is an error, at every call."""
    bound, given = [], []

    def bind(self, q, k, causal):
        bound.append((q.shape, causal))
        return lambda *arguments: given.append(arguments) or arguments[0]

    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", bind)
    q, k = attention_problem(4)
    q, k = q.astype(mx.bfloat16), k.astype(mx.bfloat16)
    kernel = AttentionKernel(attend, {}, Switch(16), "cuda")
    old = SimpleNamespace(n_keys=mx.array([30], mx.int32))
    new = SimpleNamespace(n_keys=mx.array([34], mx.int32), fresh=(k[:, :, :4], k[:, :, 4:8]))
    for cache in (old, new, new):
        kernel(q, k, k, cache=cache, scale=0.125, mask="causal")
    assert bound == [(q.shape, True)]
    assert [len(arguments[4]) for arguments in given] == [0, 2, 2]
    assert given[1][4][0] is new.fresh[0] and given[0][3] is old.n_keys
    for wrong in ({"mask": mx.ones((4, 40), mx.bool_)}, {"sinks": mx.zeros(q.shape[1])}):
        with pytest.raises(KernelError, match="Whole buffers must go to the kernel"):
            kernel(q, k, k, cache=old, scale=0.125, **{"mask": "causal", **wrong})


def test_one_query_that_stays_stock_is_asked_again_when_something_changes(monkeypatch):
    monkeypatch.setattr(
        "spec_kernels.attention_layers.RowAttention.bound",
        lambda self, q, k, causal: lambda q, k, v, *whole: "kernel",
    )
    given, switch = [], Switch(16)

    def original(*arrays, **settings):
        given.append(settings)
        return "own"

    kernel = AttentionKernel(original, {4: 1}, switch, "cuda", raced=False)
    q, k = attention_problem(1)
    rest, buffers = {"cache": None, "scale": 0.125}, SimpleNamespace(n_keys=mx.array([30]))
    assert [kernel(q, k, k, **rest) for _ in range(3)] == ["own"] * 3
    assert given == [{**rest, "mask": None}] * 3 and switch.calls == {}
    kernel(q, k, k, **rest, sinks=(sinks := mx.zeros(4)), other=1)
    assert given[3]["sinks"] is sinks and given[3]["other"] == 1
    assert isinstance(kernel(q, k, k, **rest, mask=mx.ones((1, 40), mx.bool_)), mx.array)
    assert switch.calls == {"attention plain": 1} and len(given) == 4
    assert kernel(q, k, k, **{**rest, "cache": buffers}) == "kernel"
    for always, who in ((True, "kernel"), (False, "own")):
        kernel.serve_single(always)
        switch.forget()
        assert kernel(q, k, k, **rest) == who
    assert kernel.least_keys(4) == 1 and kernel.least_keys(1) is None


def test_layers_of_a_kind_share_a_class():
    """Python keeps what it has looked up by class."""
    layers, switch = [Attention(), Attention()], Switch(16)
    for layer in layers:
        wrap_attention(layer, "attend", kernel := AttentionKernel(attend, {}, switch, "cuda"))
    assert type(layers[0]) is not type(layers[1])  # kernels of their own
    for layer in layers:
        unwrap(layer)
        wrap_attention(layer, "attend", kernel)
    assert type(layers[0]) is type(layers[1]) is not Attention
    unwrap(layers[0])
    assert type(layers[0]) is Attention is not type(layers[1])


def test_exact_attention_names_what_it_cannot_serve():
    kernel = AttentionKernel(attend, {}, Switch(16, exact=True), "cuda")
    q, k = attention_problem(4)
    with pytest.raises(ExactError, match=r"\[exact\] attention must .* got: only the causal mask"):
        kernel(q, k, k, cache=None, scale=0.125, mask=mx.ones((4, 40), mx.bool_))
    with pytest.raises(ExactError, match="attention sinks"):
        kernel(q, k, k, cache=None, scale=0.125, mask=None, sinks=mx.zeros(4))


def test_layers_that_call_no_attention_are_left_alone():
    assert attention_function(nn.Linear(4, 4), "attend") is None
    assert attention_function(Attention(), "another") is None
