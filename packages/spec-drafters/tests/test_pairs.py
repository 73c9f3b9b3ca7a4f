"""The table of known pairs and how a model's name finds its entry."""

import pytest

from spec_drafters.pairs import find_other, find_pair, known_pairs, other_heads


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("mlx-community/Qwen3-4B-8bit", "qwen3-4b"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("/home/me/models/Qwen3-14B-MLX-4bit/", "qwen3-14b"),
        ("mlx-community/Qwen3.8-27B-4bit", "qwen3.8-27b"),
        ("mlx-community/Qwen3.8-27B-8bit", "qwen3.8-27b-8bit"),
        ("someone/qwen3.6-35b-a3b-nvfp4", "qwen3.6-35b-a3b"),
        ("google/gemma4-12b-it", "gemma-4-12b"),
        ("mlx-community/Muse-Glimmer-30B-8bit", "muse-glimmer-30b"),
        ("LiquidAI/LFM2.5-1.2B-Instruct", "lfm2.5-1.2b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        ("Qwen/Qwen3-0.6B", None),
        ("qwen3-4b/other-model", None),
    ],
)
def test_the_last_part_of_a_name_finds_the_longest_id(model: str, wanted: str | None) -> None:
    pair = find_pair(model)
    assert (pair.id if pair else None) == wanted


def test_every_registered_target_finds_its_own_entry() -> None:
    for pair in known_pairs():
        assert find_pair(pair.target) == pair


def test_auto_picks_the_entrys_mode_and_then_what_there_is() -> None:
    by_id = {pair.id: pair for pair in known_pairs()}
    assert by_id["qwen3.8-27b"].drafter_for("auto") == "incoai/Qwen3.8-27B-DFlash2"
    assert by_id["qwen3-4b"].drafter_for("auto") == "deepseek-ai/dspark_qwen3_4b_block7"
    assert by_id["qwen3-4b"].drafter_for("dflash") == "z-lab/Qwen3-4B-DFlash-b16"
    assert by_id["qwen3-14b"].drafter_for("dflash") is None
    assert by_id["qwen3-14b"].drafter_for("eagle3") is None


@pytest.mark.parametrize(
    ("model", "mode", "wanted"),
    [
        ("mlx-community/Qwen3-4B-8bit", "eagle3", "deepseek-ai/eagle3_qwen3_4b_ttt7"),
        ("someone/gemma4-31b-it-4bit", "dspark", "RedHatAI/gemma-4-31B-it-speculator.dspark"),
        ("/models/Qwen3.6-27B-MLX/", "dflash", "z-lab/Qwen3.6-27B-DFlash"),
        ("mlx-community/DeepSeek-V4.1-Flash-4bit", "dspark", "deepseek-ai/DeepSeek-V4.1-Flash"),
        ("mlx-community/Qwen3-14B-8bit", "eagle3", None),
        ("Qwen/Qwen3-0.6B", "dspark", None),
    ],
)
def test_a_head_that_no_pair_picks_is_found_by_target_and_mode(
    model: str, mode: str, wanted: str | None
) -> None:
    assert find_other(model, mode) == wanted


def test_the_table_is_consistent() -> None:
    pairs = known_pairs()
    assert len(pairs) == len({pair.id for pair in pairs}) == 17
    for pair in pairs:
        assert pair.id == pair.id.lower()
        assert pair.drafter_for(pair.mode) is not None
        assert 1 <= pair.cap <= pair.drafts <= pair.block
    picked = {name for pair in pairs for name in (pair.dspark, pair.dflash)}
    for head in other_heads():
        assert head.mode in ("dspark", "dflash", "eagle3") and head.head not in picked
        assert find_other(head.target, head.mode) is not None
