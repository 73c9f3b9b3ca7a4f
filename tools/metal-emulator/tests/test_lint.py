"""The linter finds what the emulator would let through."""

import pytest
from metal_emulator import lint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("const T* p = x;", '"T\\*" needs an address space'),
        ("inline uint f(const uint* w) { return w[0]; }", '"uint\\*" needs an address space'),
        ("void g(float& r) { r = 1; }", '"float&" needs an address space'),
        ("float a = *(float4*)p;", '"float4\\*" needs an address space'),
        ("int n = std::min(a, b);", "std::"),
        ("double d = 1.0f;", "double"),
        ('printf("x");', "printf"),
        ("auto* q = new float[4];", "not allowed"),
    ],
)
def test_a_problem_is_found(text, message):
    problems = lint("int ok = 1;\n" + text)
    assert len(problems) >= 1
    import re

    assert any(re.search(message, problem) for problem in problems)
    assert all(problem.startswith("line 2: ") for problem in problems)


@pytest.mark.parametrize(
    "text",
    [
        "const device T* p = x;",
        "device const float* q = y + 1;",
        "threadgroup vec<T, 4>* t = (threadgroup vec<T, 4>*)(kt + r * LD + c);",
        "inline uint f(thread const uint* w, int i) { return w[i] & 1u; }",
        "const constant int& n = m; int k = a * b; float c = K * x; int d = 8 * N + M;",
        "size_t i = size_t(n) * K + size_t(k) * BITS / 8;",
        "if (a && b) x &= 3u; uint v = w[i] >> o & mask;",
        "// std::min of double* p\n",
        "int m = min(N * NT, K * RT);",
    ],
)
def test_sound_text_passes(text):
    assert lint(text) == []
