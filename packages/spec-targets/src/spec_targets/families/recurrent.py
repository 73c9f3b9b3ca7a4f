"""Families with recurrent layers: which module of a layer carries the state, and how."""

from typing import Any

from spec_targets.families.layout import Layout, StackFamily, part
from spec_targets.recurrent import GATED_DELTA, MAMBA2, Recurrence, watch, watch_layer


class RecurrentFamily(StackFamily):
    """A stack where some layers keep a RecurrentCache.

    Args:
        layout: Where its parts are.
        mixer: Name of the recurrent module in a layer; layers without it have attention.
        convolutions: Paths in the mixer of its convolutions, in the order of their slots.
        recurrence: What the mixer runs after them; None for a pure convolution.
    """

    def __init__(
        self,
        layout: Layout,
        mixer: str,
        convolutions: tuple[str, ...] = ("conv1d",),
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__(layout)
        self._mixer = mixer
        self._convolutions = convolutions
        self._recurrence = recurrence

    def prepare(self, model: Any) -> None:
        """Let every recurrent layer note what it reads."""
        first = self._convolutions[0].partition(".")[0]
        for layer in self.layers(model):
            mixer: Any = layer[self._mixer] if self._mixer in layer else None
            if mixer is not None and first in mixer:
                convolutions = [part(mixer, path) for path in self._convolutions]
                watch(mixer, convolutions, self._recurrence)


class ReplayFamily(StackFamily):
    """A stack whose recurrent layers run again as a whole: recurrences that have no name here."""

    def prepare(self, model: Any) -> None:
        """Let every layer note what it was called with."""
        for layer in self.layers(model):
            watch_layer(layer)


def _gated_delta(owner: str = "", mixer: str = "linear_attn") -> RecurrentFamily:
    return RecurrentFamily(Layout(owner=owner), mixer, recurrence=GATED_DELTA)


def _mamba2(layout: Layout, mixer: str) -> RecurrentFamily:
    return RecurrentFamily(layout, mixer, recurrence=MAMBA2)


def _short_convolution(owner: str = "") -> RecurrentFamily:
    return RecurrentFamily(Layout(owner=owner, norm="embedding_norm"), "conv", ("conv",))


_BACKBONE = Layout(backbone="backbone", embedding="embeddings", norm="norm_f")
_QKV = ("q_conv1d", "k_conv1d", "v_conv1d")
RECURRENT: dict[str, StackFamily] = {
    "bailing_moe_linear": ReplayFamily(Layout(embedding="word_embeddings")),
    "falcon_h1": _mamba2(Layout(norm="final_layernorm"), "mamba"),
    "gear": ReplayFamily(),
    "granitemoehybrid": _mamba2(Layout(), "mamba"),
    "jamba": ReplayFamily(Layout(norm="final_layernorm")),
    "lfm2": _short_convolution(),
    "lfm2-vl": _short_convolution("language_model"),
    "lfm2_moe": _short_convolution(),
    "mamba": ReplayFamily(_BACKBONE),
    "mamba2": _mamba2(_BACKBONE, "mixer"),
    "nemotron_h": _mamba2(_BACKBONE, "mixer"),
    "olmo_hybrid": RecurrentFamily(Layout(), "linear_attn", _QKV, GATED_DELTA),
    "plamo2": _mamba2(Layout(layers="layers.layers"), "mixer"),
    "qwen3_5": _gated_delta("language_model"),
    "qwen3_5_moe": _gated_delta("language_model"),
    "qwen3_next": _gated_delta(),
    "recurrent_gemma": ReplayFamily(Layout(norm="final_norm")),
    "rwkv7": ReplayFamily(Layout(embedding="embeddings")),
}
