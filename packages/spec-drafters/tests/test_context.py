"""The context cache against plain concatenation."""

import mlx.core as mx
import pytest

from spec_drafters._context import ContextCache


def rows(start: int, n: int) -> mx.array:
    """Rows that carry their own position: (1, 2, n, 4)."""
    positions = mx.arange(start, start + n, dtype=mx.float32)
    return mx.broadcast_to(positions[None, None, :, None], (1, 2, n, 4)) + 0


def kept_positions(cache: ContextCache, n_block: int) -> list[int]:
    keys, values = cache.with_block(rows(-100, n_block), rows(-100, n_block))
    assert mx.array_equal(keys, values)
    found = keys[0, 0, :, 0].tolist()
    assert found[len(found) - n_block :] == list(range(-100, -100 + n_block))
    return [int(x) for x in found[: len(found) - n_block]]


@pytest.mark.parametrize("window", [None, 5, 7, 300])
@pytest.mark.parametrize("sizes", [[1] * 20, [3, 4, 1, 9, 2], [40, 1, 1, 13], [300, 300, 5]])
def test_holds_the_newest_rows_and_knows_their_positions(
    window: int | None, sizes: list[int]
) -> None:
    cache = ContextCache(window, n_block=3)
    seen = 0
    for size in sizes:
        cache.append(rows(seen, size), rows(seen, size))
        seen += size
        want = list(range(seen))[-(window or seen) :]
        assert cache.n_rows == seen
        assert sorted(kept_positions(cache, 3)) == want
        assert cache.positions().tolist() == kept_positions(cache, 2)


def test_block_rows_leave_no_trace() -> None:
    cache = ContextCache(6, n_block=4)
    cache.append(rows(0, 4), rows(0, 4))
    kept_positions(cache, 4)
    cache.append(rows(4, 1), rows(4, 1))
    assert sorted(kept_positions(cache, 1)) == [0, 1, 2, 3, 4]


def test_a_snapshot_is_not_changed_by_later_rows() -> None:
    cache = ContextCache(6, n_block=2)
    cache.append(rows(0, 4), rows(0, 4))
    snapshot = cache.state()
    cache.append(rows(90, 5), rows(90, 5))
    kept_positions(cache, 2)
    cache.restore(snapshot)
    assert kept_positions(cache, 1) == [0, 1, 2, 3]
    cache.append(rows(50, 1), rows(50, 1))
    other = ContextCache(6, n_block=2)
    other.restore(snapshot)
    assert kept_positions(other, 1) == [0, 1, 2, 3]


def test_a_snapshot_serves_for_its_first_rows_until_the_window_moves_on() -> None:
    cache = ContextCache(6, n_block=2)
    cache.append(rows(0, 5), rows(0, 5))
    whole = cache.state()
    cache.append(rows(5, 3), rows(5, 3))
    wrapped = cache.state()
    short = cache.shortened(whole, 3)
    assert short is not None and cache.shortened(whole, 5) == whole
    cache.restore(short)
    cache.append(rows(70, 1), rows(70, 1))
    assert kept_positions(cache, 2) == [0, 1, 2, 70]
    cache.restore(whole)
    assert kept_positions(cache, 1) == [0, 1, 2, 3, 4]
    assert cache.shortened(wrapped, 7) is None and cache.shortened(wrapped, 8) == wrapped


def test_reset_forgets_every_row() -> None:
    cache = ContextCache(4, n_block=2)
    cache.append(rows(0, 9), rows(0, 9))
    cache.reset()
    assert cache.n_used == 0
    cache.append(rows(20, 2), rows(20, 2))
    assert kept_positions(cache, 2) == [20, 21]


@pytest.mark.parametrize(("window", "sizes"), [(1000, [10, 2048]), (1024, [10, 10, 1500])])
def test_more_rows_than_the_window_may_follow_few(window: int, sizes: list[int]) -> None:
    cache, seen = ContextCache(window, n_block=3), 0
    for size in sizes:
        cache.append(rows(seen, size), rows(seen, size))
        seen += size
    assert sorted(kept_positions(cache, 3)) == list(range(seen))[-window:]


def test_a_snapshot_does_not_serve_for_more_rows_than_it_has() -> None:
    cache = ContextCache(None, n_block=3)
    cache.append(rows(0, 10), rows(0, 10))
    assert cache.shortened(cache.state(), 11) is None
