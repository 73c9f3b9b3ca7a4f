"""Every kernel tried on this device, one by one: what a person pastes into a report.

On a GPU each operation's kernel over the bits, groups, dtypes and head dimensions it serves, then a
few races. On every backend the plain `_ops` references against float32 arithmetic spelled out. Asks
`numerics` and `race`; decides nothing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from spec_kernels._build import backend
from spec_kernels.attention import row_attention_ops, unsupported
from spec_kernels.exact import row_invariant
from spec_kernels.gate import Gate
from spec_kernels.hardware import this_device
from spec_kernels.matmul import BITS, GROUPS, RowMatmul, verify_matmul_ops
from spec_kernels.numerics import (
    ATTENTION_TOLERANCE,
    TOLERANCE,
    AttentionShape,
    MatmulShape,
    attention_problem,
    matmul_problem,
    random_weight,
    relative_error,
)
from spec_kernels.prefill import wide_prefill_ops
from spec_kernels.race import race_attention, race_matmul

Outcome = Literal["pass", "fail", "skip"]
N, K = 264, 512  # outputs that fill no tile evenly; inputs that every group divides
_ROWS = 16
RACED_MATMUL = MatmulShape(4096, 4096, 4, 64, "bfloat16")
RACED_ATTENTION = AttentionShape(32, 8, 128, "bfloat16")


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing tried.

    Attributes:
        name: Operation and shape.
        outcome: "pass", "fail", or "skip" where this backend does not serve it.
        detail: What was wrong, why it was skipped, or what was measured.
        seconds: How long it took, compiling included.
    """

    name: str
    outcome: Outcome
    detail: str
    seconds: float


def matmul_shapes(where: str) -> list[MatmulShape]:
    """Every bits and group in bfloat16; the other dtypes at 4 and 8 bits; plain weights."""
    shapes = [MatmulShape(N, K, bits, group, "bfloat16") for bits in BITS for group in GROUPS]
    others = ("float16", "float32") if where == "metal" else ("float16",)
    shapes += [MatmulShape(N, K, bits, 64, dtype) for dtype in others for bits in (4, 8)]
    return shapes if where == "metal" else [*shapes, MatmulShape(N, K, 16, 64, "bfloat16")]


def attention_shapes() -> list[AttentionShape]:
    """Every head dimension in bfloat16, grouped heads; one float16, one without groups."""
    shapes = [AttentionShape(8, 2, depth, "bfloat16") for depth in (64, 80, 96, 128)]
    return [*shapes, AttentionShape(8, 2, 128, "float16"), AttentionShape(4, 4, 128, "bfloat16")]


def probes(where: str | None = None, *, race: bool = True, **build: Any) -> Iterator[Probe]:
    """Try everything; an error of one probe is its outcome, never raised.

    Args:
        where: "metal", "cuda" or "cpu"; the default device's backend without.
        race: Time kernels against stock MLX as well.
        **build: Passed on to the kernels, such as an emulator's `factory`.
    """
    where = where or backend()
    yield from _references(where)
    if where == "cpu":
        yield Probe("kernels", "skip", "no kernels on this backend", 0.0)
        return
    for shape in matmul_shapes(where):
        yield _tried(f"matmul {shape}", _problem(matmul_problem, shape, where, **build))
    for shape in attention_shapes():
        yield _attention(shape, where, **build)
    if where == "cuda":
        yield _tried("matmul, three weights in one launch", lambda: _shared(where))
    if race:
        yield _raced(f"race matmul {RACED_MATMUL}", lambda: race_matmul(RACED_MATMUL, where))
        call = f"race attention {RACED_ATTENTION}"
        yield _raced(call, lambda: race_attention(RACED_ATTENTION, where))


def _problem(check: Callable[..., str | None], *given: Any, **build: Any) -> Callable[[], Any]:
    return lambda: check(*given, **build)


def _tried(name: str, check: Callable[[], str | None]) -> Probe:
    start = time.perf_counter()
    try:
        problem = check()
    except Exception as error:  # a driver or compiler fails in its own ways: report them all
        problem = _first_line(error)
    seconds = time.perf_counter() - start
    return Probe(name, "fail" if problem else "pass", problem or "", seconds)


def _raced(name: str, race: Callable[[], Any]) -> Probe:
    start = time.perf_counter()
    try:
        speedup: dict[str, float] = race().speedup
    except Exception as error:  # as above
        return Probe(name, "fail", _first_line(error), time.perf_counter() - start)
    detail = "times stock MLX: " + ", ".join(f"{at} {x:.2f}" for at, x in speedup.items())
    return Probe(name, "pass", detail, time.perf_counter() - start)


def _attention(shape: AttentionShape, where: str, **build: Any) -> Probe:
    name = f"attention {shape}"
    dtype = mx.float16 if shape.dtype == "float16" else mx.bfloat16
    q = mx.zeros((1, shape.heads, 1, shape.depth), dtype)
    k = mx.zeros((1, shape.kv_heads, 1, shape.depth), dtype)
    reason = unsupported(q, k, "causal", where)
    if reason:
        return Probe(name, "skip", reason, 0.0)
    return _tried(name, _problem(attention_problem, shape, where, **build))


def _shared(where: str) -> str | None:
    shape = MatmulShape(N, K, 4, 64, "bfloat16")
    together = RowMatmul([random_weight(shape, seed=i) for i in range(3)], where)
    same = Gate(this_device(), race=False).shares(together)
    return None if same else "one launch gives other bits than one launch each"


# -- references ----------------------------------------------------------------------------------


def _references(where: str) -> Iterator[Probe]:
    # On CUDA a float32 product may be taken in TF32, and no kernel serves float32.
    for dtype in ("bfloat16", "float16") if where == "cuda" else ("bfloat16", "float16", "float32"):
        for bits in (4, 8):
            shape = MatmulShape(N, K, bits, 64, dtype)
            yield _tried(f"verify_matmul_ops {shape}", _problem(_matmul_ops_problem, shape))
    yield _tried("wide_prefill_ops 4-bit g64 bfloat16", _wide_problem)
    for dtype in ("bfloat16", "float16"):
        shape = AttentionShape(8, 2, 64, dtype)
        yield _tried(f"row_attention_ops {shape}", _problem(_attention_ops_problem, shape))
    yield _rows_alone()


def _matmul_ops_problem(shape: MatmulShape) -> str | None:
    weight = random_weight(shape)
    x = mx.random.normal((_ROWS, shape.k), key=mx.random.key(1)).astype(weight.dtype)
    assert weight.scales is not None and weight.biases is not None
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    full = mx.dequantize(weight.w, scales, biases, weight.group_size, weight.bits)
    products = x.astype(mx.float32)[:, None] * full[None]  # (M, N, K)
    return _beyond(verify_matmul_ops(x, weight), products.sum(axis=-1), TOLERANCE[shape.dtype])


def _wide_problem() -> str | None:
    weight = random_weight(MatmulShape(N, K, 4, 64, "bfloat16"))
    x = mx.random.normal((256, K), key=mx.random.key(1)).astype(weight.dtype)
    want = verify_matmul_ops(x.astype(mx.float32), weight)
    return _beyond(wide_prefill_ops(x, weight), want, 2 * TOLERANCE["bfloat16"])


def _attention_ops_problem(shape: AttentionShape) -> str | None:
    dtype, n_keys, n_queries = getattr(mx, shape.dtype), 97, 5
    sizes = ((shape.heads, n_queries), (shape.kv_heads, n_keys), (shape.kv_heads, n_keys))
    q, k, v = (
        mx.random.normal((1, heads, length, shape.depth), key=mx.random.key(i)).astype(dtype)
        for i, (heads, length) in enumerate(sizes)
    )
    scale, group = shape.depth**-0.5, shape.heads // shape.kv_heads
    got = row_attention_ops(q, k, v, scale=scale, mask="causal")
    q, k, v = (a.astype(mx.float32) for a in (q, mx.repeat(k, group, 1), mx.repeat(v, group, 1)))
    scores = scale * (q[:, :, :, None] * k[:, :, None]).sum(axis=-1)  # (1, heads, T, N)
    newest = mx.arange(n_keys - n_queries, n_keys)[:, None]
    scores = mx.where(mx.arange(n_keys)[None] <= newest, scores, -mx.inf)
    mass = mx.exp(scores - scores.max(axis=-1, keepdims=True))
    mass = mass / mass.sum(axis=-1, keepdims=True)
    want = (mass[..., None] * v[:, :, None]).sum(axis=-2)
    return _beyond(got, want, ATTENTION_TOLERANCE[shape.dtype])


def _beyond(got: mx.array, want: mx.array, limit: float) -> str | None:
    error = relative_error(got, want)
    return None if error <= limit else f"error {error:.1e}, at most {limit:.0e} is right"


def _rows_alone() -> Probe:
    """Not a fault either way: it says whether exact mode can do without kernels here."""
    x = mx.random.normal((_ROWS, K), key=mx.random.key(0))
    w = mx.random.normal((N, K), key=mx.random.key(1))
    alone = row_invariant(lambda rows: rows @ w.T, x)
    detail = "rows keep their bits" if alone else "a row's bits depend on the rows beside it"
    return Probe("stock matmul float32", "pass" if alone else "skip", detail, 0.0)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
