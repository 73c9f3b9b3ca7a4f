import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_convert import ConvertError, convert, verify

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0])
def test_a_faithful_output_passes(make_llama, tmp_path, kind):
    convert(make_llama(kind), tmp_path / "out")
    results = verify(tmp_path / "out", make_llama(kind))
    assert len(results) == 20
    assert all(result.within and result.max_error == 0 for result in results)


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.ascontiguousarray(edit(tensors[name].copy()))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_one_changed_value_is_found(make_llama, tmp_path, part):
    convert(make_llama(Kind.Q5_0), tmp_path / "out")

    def edit(values):
        values[3, 1] = values[3, 1] ^ 4 if part == "weight" else values[3, 1] * 1.5
        return values

    change(tmp_path / "out", f"model.layers.1.self_attn.k_proj.{part}", edit)
    failed = [r.source for r in verify(tmp_path / "out", make_llama(Kind.Q5_0)) if not r.within]
    assert failed == ["blk.1.attn_k.weight"]


def test_rows_left_interleaved_are_found(make_llama, tmp_path):
    convert(make_llama(), tmp_path / "out")
    change(tmp_path / "out", "model.layers.0.self_attn.q_proj.weight", lambda rows: rows[::-1])
    failed = [r.source for r in verify(tmp_path / "out", make_llama()) if not r.within]
    assert failed == ["blk.0.attn_q.weight"]


def test_rounding_passes_and_more_than_rounding_does_not(make_llama, tmp_path):
    convert(make_llama(), tmp_path / "out", dtype="f16")
    results = verify(tmp_path / "out", make_llama())
    assert all(r.within for r in results) and any(r.max_error > 0 for r in results)
    change(tmp_path / "out", "model.norm.weight", lambda v: np.nextafter(v, np.float16(9)) * v)
    failed = [r.source for r in verify(tmp_path / "out", make_llama()) if not r.within]
    assert failed == ["output_norm.weight"]


def test_missing_and_left_over_tensors_are_named(make_llama, tmp_path):
    convert(make_llama(), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"extra": np.zeros(1, np.float32)}, path)
    with pytest.raises(ConvertError, match='got "extra" too'):
        verify(tmp_path / "out", make_llama())
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ConvertError, match='"model.norm.weight", which is missing'):
        verify(tmp_path / "out", make_llama())


def test_a_cut_or_damaged_file_of_weights_is_named(make_llama, tmp_path):
    convert(make_llama(), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ConvertError, match=r"must fill (\d+) bytes .*, got (\d+)") as found:
        verify(tmp_path / "out", make_llama())
    wanted, held = re.search(r"fill (\d+) .* got (\d+)", str(found.value)).groups()
    assert int(held) == int(wanted) - 4
    for header in (b"[]", b'{"a":1}', b'{"a":{}}', b"{broken", b'{"a":{"dtype":"F7"}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ConvertError, match="must be a safetensors file"):
            verify(tmp_path / "out", make_llama())


def test_progress_ends_at_every_byte(make_llama, tmp_path):
    convert(make_llama(), tmp_path / "out")
    seen = []
    results = verify(tmp_path / "out", make_llama(), progress=lambda *step: seen.append(step))
    done, totals, names = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == totals[0] == totals[-1]
    assert list(names) == [result.source for result in results]


def test_a_folder_without_weights_is_named(make_llama, tmp_path):
    with pytest.raises(ConvertError, match=r"must hold model\*.safetensors, got none"):
        verify(tmp_path, make_llama())


def test_another_models_output_is_refused(make_llama, make_gguf, tmp_path):
    convert(make_llama(), tmp_path / "out")
    change(tmp_path / "out", "model.norm.weight", lambda values: values[:32])
    with pytest.raises(ConvertError, match=r"must have shape \(64,\), got \(32,\)"):
        verify(tmp_path / "out", make_llama())
