"""States on disk: found again after a restart, never used when they are not what was written."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair
from spec_server import Served, Server, Settings
from spec_server.disk import DiskTier, fingerprint
from spec_targets import load_target
from spec_targets.snapshot import rebuilt

PROMPT = [20 + i % 90 for i in range(120)]


def ask(server, prompt=PROMPT):
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 10}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    return answer["choices"][0]["text"], answer["x_spec"]["cached_tokens"]


@pytest.fixture
def serve(load_tiny, tmp_path):
    def start(**loader):
        return Server(load_tiny(**loader), Settings(port=0, prefix_dir=tmp_path / "states"))

    return start


def files(tmp_path):
    return sorted((tmp_path / "states").rglob("*.safetensors"))


def test_a_restarted_server_goes_on_from_what_was_kept(serve, tmp_path):
    with serve() as server:
        text, cached = ask(server)
        assert cached == 0
    assert len(files(tmp_path)) == 1
    with serve() as server:
        assert ask(server) == (text, 119)
        assert (
            'spec_prefix_cache_hits_total{tier="disk"} 1.0'
            in httpx.get(f"{server.url}/metrics").text
        )
        follow = [*PROMPT, 33, 34]
        warm = ask(server, follow)
    with serve(drafts=False) as other:  # another mode is another folder
        assert ask(other, follow) == (warm[0], 0)


def test_packed_states_are_used_again_at_once_and_after_a_restart(serve, folder_of, tmp_path):
    path = folder_of("qwen3", head_dim=32)
    with serve(path=path, kv_bits=8) as server:
        text, cached = ask(server)
        assert cached == 0 and ask(server) == (text, 119)

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                bodies = [{"model": "m", "prompt": PROMPT[: 30 + 7 * i], "temperature": 0}
                          for i in range(4)]  # fmt: skip
                return await asyncio.gather(
                    *(client.post("/v1/completions", json=b) for b in bodies)
                )

        answers = asyncio.run(crowd())
        assert [answer.status_code for answer in answers] == [200] * 4
    with serve(path=path, kv_bits=8) as server:
        assert ask(server) == (text, 119)
    for other in (4, None):  # states of other bits are other states
        with serve(path=path, kv_bits=other) as server:
            assert ask(server)[1] == 0


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a flipped byte": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "a flipped byte in the header": lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
    "something else": lambda data: b"<html>",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_misses_and_go(serve, tmp_path, name):
    with serve() as server:
        text, _ = ask(server)
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    with serve() as server:
        assert ask(server) == (text, 0)
        assert path not in files(tmp_path)


def test_swapped_files_are_misses(serve, tmp_path):
    with serve() as server:
        first, second = ask(server), ask(server, PROMPT[::-1])
    one, other = files(tmp_path)
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    with serve() as server:
        assert ask(server) == (first[0], 0) and ask(server, PROMPT[::-1]) == (second[0], 0)


def test_other_weights_of_the_same_name_have_another_fingerprint(folder):
    def served(change=None, **settings):
        target, tokenizer = load_target(folder)
        if change is not None:
            change(target.model)
        made = {"mode": "baseline", "model": "tiny", **settings}
        return Served(Pair(target, None, tokenizer), make_cap=lambda w: FixedCap(0), **made)

    def nudge(model):
        layer = model.model.layers[1].self_attn.q_proj
        layer.weight = layer.weight + 0.001

    own = fingerprint(served())
    assert fingerprint(served()) == own
    others = {
        fingerprint(served(nudge)),
        fingerprint(served(lambda m: m.set_dtype(mx.float16))),
        fingerprint(served(mode="lookup")),
        fingerprint(served(fingerprint="adapter")),
    }
    assert own not in others and len(others) == 4


def test_a_folder_that_cannot_be_used_is_done_without(load_tiny, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with Server(load_tiny(), Settings(port=0, prefix_dir=blocked)) as server:
        assert ask(server)[1] == 0 and ask(server)[1] == 119


def test_the_disk_budget_holds(folder, tmp_path):
    target, _ = load_target(folder)
    frozen = []
    for first in range(20, 26):
        cache = target.make_cache()
        target.prefill([first, *PROMPT], cache)
        frozen.append(target.freeze(cache))
    tier = DiskTier(tmp_path, 10**9, rebuilt)
    tier.save((20, *PROMPT), frozen[0])
    size = tier.stored[0].nbytes
    small = DiskTier(tmp_path, int(2.5 * size), rebuilt)
    for i in range(1, 6):
        small.save((20 + i, *PROMPT), frozen[i])
        time.sleep(0.01)
    assert [s.tokens[0] for s in small.stored] == [24, 25]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.fixture
def only_read(monkeypatch):
    """Call it, and nothing can be changed in any folder: root may always, so by the functions."""

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    def begin():
        for owner, name in ((os, "utime"), (Path, "unlink"), (Path, "replace"), (os, "fsync")):
            monkeypatch.setattr(owner, name, refuse)

    return begin


def test_a_folder_for_reading_alone_is_read_and_harms_nobody(serve, tmp_path, only_read):
    with serve() as server:
        text, _ = ask(server)
    damaged = files(tmp_path)[0].with_stem("0" * 64)
    damaged.write_bytes(files(tmp_path)[0].read_bytes())
    only_read()
    with serve() as server:
        assert ask(server) == (text, 119)
        others = [[(first + i) % 90 + 20 for i in range(60)] for first in range(3)]
        for prompt in others:
            assert ask(server, prompt)[0] and ask(server, prompt)[1] == 59
        wait_idle(server)
        assert server.engine.alive


def wait_idle(server):
    """Until the engine has tried to write what it keeps."""
    end = time.monotonic() + 10
    while server.engine.prefix._unwritten:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)


def test_a_second_server_leaves_what_the_first_one_is_writing(tmp_path):
    young, old = tmp_path / "a.part", tmp_path / "b.part"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    DiskTier(tmp_path, 10**9, rebuilt)
    assert young.exists() and not old.exists()


WRITER = """
import sys
import mlx.core as mx
from pathlib import Path
from spec_server.disk import DiskTier
from spec_targets.snapshot import FrozenCache, FrozenEntry, rebuilt
tier = DiskTier(Path(sys.argv[1]), 10**9, rebuilt)
print("ready", flush=True)
for n in range(10**6):
    rows = mx.full((1, 2, 4096, 64), n % 97, mx.float32)
    tier.save((n, *range(30)), FrozenCache((FrozenEntry("rows", (rows, rows), 4096),), 4096))
    print(n, flush=True)
"""


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "delay_s", [0.0, pytest.param(0.013, marks=SLOW), pytest.param(0.04, marks=SLOW)]
)
def test_a_writer_that_is_killed_leaves_only_whole_states(tmp_path, delay_s):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "2":
            break
    time.sleep(delay_s)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    for left in tmp_path.glob("*.part"):
        os.utime(left, (1, 1))  # nobody has written to it for long
    tier = DiskTier(tmp_path, 10**9, rebuilt)
    assert len(tier.stored) >= 3 and not list(tmp_path.glob("*.part"))
    for stored in list(tier.stored):
        frozen = tier.load(stored)
        assert frozen is not None
        keys, values = frozen.arrays()
        want = stored.tokens[0] % 97
        assert bool(mx.all(keys == want).item()) and bool(mx.all(values == want).item())
