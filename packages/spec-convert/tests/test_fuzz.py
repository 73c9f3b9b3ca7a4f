"""Damaged files: always one printable line of refusal, or a right result."""

import io
import random
import resource
import struct
from pathlib import Path

import gguf
import pytest

from spec_convert import ConvertError, convert, is_complete, verify
from spec_convert.config import generation_config
from spec_convert.container import read_container
from spec_convert.facts import Facts
from spec_convert.families import architecture_of
from spec_convert.plan import Options, make_plan
from spec_convert.tokenizer import tokenizer_files

Kind = gguf.GGMLQuantizationType
EXTREMES = (0, 1, 2, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 60, (1 << 64) - 1)


def mutated(data: bytes, header: int, chance: random.Random) -> bytes:
    """One to four changes, mostly in the header: bytes, numbers, cuts, copies, insertions."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        reach = header if chance.random() < 0.9 else len(changed)
        place = chance.randrange(min(reach, len(changed)))
        kind = chance.randrange(7)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place : place + 8] = struct.pack("<Q", chance.choice(EXTREMES))
        elif kind == 2:
            changed[place : place + 4] = struct.pack("<I", chance.choice(EXTREMES) % (1 << 32))
        elif kind == 3:
            del changed[chance.randrange(len(changed)) :]
        elif kind == 4:
            del changed[place : place + chance.randint(1, 40)]
        elif kind == 5:
            changed[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        else:
            other = chance.randrange(header)
            changed[place : place + 16] = data[other : other + 16]
        if not changed:
            break
    return bytes(changed)


def read_everything(data: bytes) -> None:
    """All that happens before a byte is written."""
    container = read_container(io.BytesIO(data), len(data))
    architecture = architecture_of(container.metadata)
    facts = Facts(container, lambda name: [1.0])
    architecture.config(facts)
    generation_config(container.metadata)
    tokenizer_files(container.metadata)
    make_plan(container, architecture, facts, Options())


def header_of(path: Path) -> tuple[bytes, int]:
    data = path.read_bytes()
    return data, read_container(io.BytesIO(data), len(data)).data_offset


def run_headers(source: Path, count: int, seed: int) -> tuple[int, int]:
    data, header = header_of(source)
    chance = random.Random(seed)
    refused = accepted = 0
    for _ in range(count):
        try:
            read_everything(mutated(data, header, chance))
            accepted += 1
        except ConvertError as error:
            refused += 1
            message = str(error)
            assert message.isprintable() and len(message) < 700, message
            assert message.startswith("[") and message.endswith((".", '"', "'")), message
    return refused, accepted


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_damaged_headers_are_refused_or_right(make_llama, seed):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, accepted = run_headers(make_llama(Kind.Q4_1), 250, seed)
    assert refused > accepted > 0
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200_000  # kilobytes


@pytest.mark.slow
def test_ten_thousand_damaged_headers_are_refused_or_right(make_llama):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, accepted = run_headers(make_llama(Kind.Q4_1), 10_000, 99)
    assert refused > accepted > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.usefixtures("each_way")
def test_damaged_files_leave_a_right_folder_or_none(make_llama, tmp_path):
    source = make_llama(Kind.Q8_0)
    data, header = header_of(source)
    chance = random.Random(5)
    damaged, out = tmp_path / "damaged.gguf", tmp_path / "out"
    refused = accepted = 0
    for _ in range(150):
        damaged.write_bytes(mutated(data, header, chance))
        try:
            convert(damaged, out, force=True)
        except ConvertError:
            refused += 1
        else:
            accepted += 1
            assert all(result.within for result in verify(out, damaged))
            assert is_complete(out)
        allowed = {source.name, damaged.name} | ({out.name} if accepted else set())
        assert {path.name for path in tmp_path.iterdir()} == allowed
    assert refused > 20 and accepted > 5
