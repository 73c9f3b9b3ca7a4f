"""What counts as threadgroup storage, and that line numbers survive."""

import pytest
from metal_emulator import EmulatorError
from metal_emulator.rewrite import blank_noise, rewrite_threadgroup


def test_arrays_become_references_into_the_threadgroups_storage():
    text = rewrite_threadgroup("{ threadgroup float a[4][N + 1], b; }")
    assert "typedef float emu_tg_0[4][N + 1]; auto& a = emu::tg_get<emu_tg_0, 0>();" in text
    assert "typedef float emu_tg_1; auto& b = emu::tg_get<emu_tg_1, 1>();" in text


@pytest.mark.parametrize(
    "text",
    [
        "{ threadgroup float* p = q; }",
        "void f(threadgroup float* p, threadgroup int& n) {}",
        "{ x = *(threadgroup float4*)(p + i); }",
        "{ // threadgroup float a[4];\n }",
    ],
)
def test_pointers_parameters_casts_and_comments_stay(text):
    assert rewrite_threadgroup(text) == text


def test_line_numbers_stay():
    text = "{\n  threadgroup vec<float, 4> a[2 *\n    N];\n  int b;\n}\n"
    assert rewrite_threadgroup(text).count("\n") == text.count("\n")


def test_a_declaration_it_cannot_parse_is_refused():
    with pytest.raises(EmulatorError, match="must be `threadgroup T a"):
        rewrite_threadgroup("{ threadgroup float a[2], -b; }")


def test_blanking_keeps_length_and_lines():
    text = 'a /* x\ny */ "s;" // z\nb'
    clean = blank_noise(text)
    assert len(clean) == len(text)
    assert clean.split() == ["a", "b"]
    assert clean.count("\n") == text.count("\n")
