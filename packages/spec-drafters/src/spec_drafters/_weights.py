"""Takes tensors out of a checkpoint by name and shape, quantises them, and reports what it did.

NVFP4 and FP8 exports are dequantised, MLX affine ones and power-of-two block scales are used as
they are. Knows nothing about heads.

References:
    NVFP4 and FP8 exports: NVIDIA Model Optimizer, `hf_quant_config.json` layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx

from spec_core import LoadError
from spec_drafters._blockscale import refuse_bad_scales, refuse_without_kernels, repack
from spec_drafters._linear import Matrix, MatrixStack, Quantised, quantise, unpacked
from spec_drafters._shards import Shards

_SCALE_NAMES = (".weight_scale", ".weight_scale_2", ".weight_scale_inv")
# Buffers, and scales of activations and caches, which are not quantised here.
_LEFTOVERS = (".input_scale", ".k_scale", ".v_scale", ".inv_freq")
# E2M1 code points; the upper half of the 16 codes is negative.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_Made = TypeVar("_Made", mx.array, Matrix, MatrixStack)


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What became of each tensor of a checkpoint.

    Attributes:
        loaded: Names used, sorted.
        ignored: Names known to be needed in training only.
        missing: Parts the checkpoint leaves to the target, such as "embed_tokens".
        bits: Bits per weight of linears and embeddings; 16 stands for the compute type.
        n_quantised: How many matrices are quantised.
        nbytes: Bytes held on the device.
    """

    loaded: tuple[str, ...]
    ignored: tuple[str, ...]
    missing: tuple[str, ...]
    bits: int
    n_quantised: int
    nbytes: int

    def __str__(self) -> str:
        """One line a person can read."""
        parts = [f"{len(self.loaded)} tensors loaded, {self.nbytes / 1e6:.1f} MB"]
        if self.n_quantised:
            parts.append(f"{self.n_quantised} matrices in {self.bits} bits")
        if self.missing:
            parts.append(f"from the target: {', '.join(self.missing)}")
        if self.ignored:
            parts.append(f"ignored: {', '.join(self.ignored)}")
        return "; ".join(parts)


class Weights:
    """The tensors of one checkpoint, taken one by one.

    Args:
        where: Family name that opens messages.
        tensors: By canonical name.
        bits: 4 or 8 quantises matrices, and leaves those as they are that come packed; 16 keeps, or
            unpacks, all of them in `dtype`.
        dtype: Type that everything else is computed in.
        packed_group_size: Group size of matrices that the checkpoint holds in MLX's packing.
        ignored: Starts of names that may be present and are not wanted.

    Raises:
        LoadError: bits is not one of 4, 8 and 16.
    """

    def __init__(
        self,
        where: str,
        tensors: Mapping[str, mx.array],
        *,
        bits: int,
        dtype: mx.Dtype,
        packed_group_size: int = 64,
        ignored: tuple[str, ...] = (),
    ) -> None:
        if bits not in (4, 8, 16):
            raise LoadError(f"[{where}] Drafter bits must be 4, 8 or 16, got {bits}.")
        self.where = where
        self.dtype = dtype
        self._bits = bits
        self._packed_group_size = packed_group_size
        self._tensors = tensors
        self._ignored = ignored
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._held: list[mx.array] = []
        self._made: list[mx.array] = []
        self._n_quantised = 0
        self._found_bits: set[int] = set()
        self._scales: list[tuple[str, mx.array]] = []  # E8M0 codes of matrices taken

    def has(self, name: str) -> bool:
        """True when the checkpoint holds the tensor."""
        return name in self._tensors

    def wants(self, name: str) -> bool:
        """True when the checkpoint holds the tensor and nobody said to ignore it."""
        return name in self._tensors and not name.startswith(self._ignored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored; of a matrix that may be packed, ask `matrix_shape`."""
        return self._tensors[name].shape

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """(out, in) of a matrix, packed or not; `name` without ".weight"."""
        array = self._matrix_array(name)
        if self.has(f"{name}.scales"):
            n_groups = self._tensors[f"{name}.scales"].shape[1]
            return array.shape[0], n_groups * self._packed_group_size
        if self.has(f"{name}.weight_scale_2"):
            return array.shape[0], array.shape[1] * 2  # NVFP4: two codes a byte
        return array.shape[0], array.shape[1]

    def ignore(self, name: str) -> None:
        """Note that a tensor is present and not wanted."""
        self._ignored = (*self._ignored, name)

    def leave(self, part: str) -> None:
        """Note that a part is left to the target."""
        self._missing.append(part)

    def array(
        self, name: str, shape: tuple[int, ...], *, dtype: mx.Dtype | None = None
    ) -> mx.array:
        """A tensor that is never quantised, cast to `dtype` (the compute type without).

        Raises:
            LoadError: it is missing or has another shape.
        """
        array = self._take(name)
        if array.size == _size(shape):
            array = array.reshape(shape)  # (1,) for (), (n,) for (1, n): writers differ
        self._check(name, array.shape, shape)
        array = array.astype(dtype or self.dtype)
        self._held.append(array)
        return array

    def offsets(self, name: str) -> list[int]:
        """A small integer table, read to the host as it is."""
        values: list[int] = self._take(name).reshape(-1).tolist()  # type: ignore[assignment]
        return values  # sync: once, at load

    def matrix(self, name: str, n_out: int, n_in: int, *, keep: bool = False) -> Matrix:
        """A linear map or a table; `name` without ".weight". Takes ".bias" along if present.

        Args:
            name: Its base name.
            n_out: Rows.
            n_in: Columns.
            keep: Do not quantise.

        Raises:
            LoadError: it is missing or has another shape.
        """
        bias = None
        if self.has(f"{name}.bias"):
            bias = self.array(f"{name}.bias", (n_out,))
        if self.has(f"{name}.scales"):
            found = self._packed(name, n_out, n_in, bias)
        elif self.has(f"{name}.scale"):
            weight, packing = self._block_scaled(name, n_out, n_in)
            self._scales.append((name, packing.scales))
            found = self._settled(weight, packing)
        else:
            found = Matrix(self._plain(name, (n_out, n_in)), bias)
            group = next((g for g in (64, 32) if n_in % g == 0), None)
            if not keep and self._bits < 16 and group is not None:
                found = quantise(found, self._bits, group)
        self._count(found.quantised)
        self._held += found.arrays
        return found

    def stack(self, names: Sequence[str], n_out: int, n_in: int) -> MatrixStack:
        """Matrices of one shape and packing as one; evaluates them and gives up what was read.

        Args:
            names: Base names, in order.
            n_out: Rows of each.
            n_in: Columns of each.

        Raises:
            LoadError: one is missing, has another shape, or is packed unlike the first.
        """
        scaled = [self.has(f"{name}.scale") for name in names]
        if any(scaled) and not all(scaled):
            raise self._absent(f"{names[scaled.index(False)]}.scale")
        if not any(scaled):
            plain = mx.stack([self._plain(name, (n_out, n_in)) for name in names])
            found = MatrixStack(plain)
            group = next((g for g in (64, 32) if n_in % g == 0), None)
            if self._bits < 16 and group is not None:
                matrix = quantise(Matrix(plain), self._bits, group)
                found = MatrixStack(matrix.weight, matrix.quantised)
        else:
            parts = [self._block_scaled(name, n_out, n_in) for name in names]
            kinds = [packing.mode for _, packing in parts]
            other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
            if other is not None:
                raise LoadError(
                    f'[{self.where}] "{names[other]}" must be packed like "{names[0]}", got '
                    f"{kinds[other]} and {kinds[0]}. Download the checkpoint again."
                )
            packing = replace(parts[0][1], scales=mx.stack([one.scales for _, one in parts]))
            self._scales.append((f"{names[0]} .. {names[-1]}", packing.scales))
            matrix = self._settled(mx.stack([weight for weight, _ in parts]), packing)
            found = MatrixStack(matrix.weight, matrix.quantised)
        self._count(found.quantised)
        self._held += found.arrays
        mx.eval(found.arrays)
        if isinstance(self._tensors, Shards):
            self._tensors.release()
        return found

    def keep(self, made: _Made) -> _Made:
        """Have what was computed from tensors evaluated too: only its thread could do so later."""
        self._made += [made] if isinstance(made, mx.array) else made.arrays
        return made

    def finish(self) -> WeightReport:
        """Check that nothing unknown is left, evaluate, report.

        Raises:
            LoadError: tensors are left that nobody asked for.
        """
        left = sorted(set(self._tensors) - self._taken)
        unknown = [name for name in left if not self._may_ignore(name)]
        if unknown:
            listed = ", ".join(f'"{n}"' for n in unknown[:4])
            more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
            raise LoadError(
                f"[{self.where}] Every tensor must have a place, got {listed}{more} without one. "
                "The checkpoint uses an algorithm that is not supported."
            )
        mx.eval(self._held)
        refuse_bad_scales(self._scales, self.where)
        nbytes = sum(array.nbytes for array in self._held)
        self._held.clear()  # what was joined is held once
        mx.eval(self._made)
        return WeightReport(
            loaded=tuple(sorted(self._taken)),
            ignored=tuple(left),
            missing=tuple(self._missing),
            bits=max(self._found_bits, default=16),
            n_quantised=self._n_quantised,
            nbytes=nbytes,
        )

    def _count(self, quantised: Quantised | None) -> None:
        if quantised is not None:
            self._n_quantised += 1
            self._found_bits.add(quantised.bits)

    def _block_scaled(self, base: str, n_out: int, n_in: int) -> tuple[mx.array, Quantised]:
        """A matrix with a power-of-two scale per block, in MLX's packing."""
        weight, scale = self._take(f"{base}.weight"), self._take(f"{base}.scale")
        return repack(base, weight, scale, n_out, n_in, self.where)

    def _settled(self, weight: mx.array, packing: Quantised) -> Matrix:
        """Packed as it is, or plain where plain matrices are asked for."""
        if self._bits < 16:
            refuse_without_kernels(packing.mode, packing.bits, self.where)
            return Matrix(weight, quantised=packing)
        return Matrix(unpacked(weight, packing, self.dtype))

    def _may_ignore(self, name: str) -> bool:
        empty = self._tensors[name].size == 0  # a Markov table of rank 0
        return empty or name.startswith(self._ignored) or name.endswith(_LEFTOVERS)

    def _matrix_array(self, name: str) -> mx.array:
        for candidate in (f"{name}.weight", name):
            if candidate in self._tensors:
                return self._tensors[candidate]
        raise self._absent(f"{name}.weight")

    def _take(self, name: str) -> mx.array:
        if name not in self._tensors:
            raise self._absent(name)
        self._taken.add(name)
        return self._tensors[name]

    def _absent(self, name: str) -> LoadError:
        return LoadError(
            f'[{self.where}] The checkpoint must hold "{name}", got {len(self._tensors)} other '
            "tensors. Download it again, or use a complete export."
        )

    def _check(self, name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
        if tuple(got) != want:
            raise LoadError(
                f'[{self.where}] "{name}" must have shape {want} to fit config.json and the '
                f"target, got {tuple(got)}. Use the drafter made for this target."
            )

    def _plain(self, base: str, shape: tuple[int, int]) -> mx.array:
        name = f"{base}.weight" if self.has(f"{base}.weight") else base
        if not self.has(name):
            raise self._absent(f"{base}.weight")
        array = self._take(name)
        scales = {s: self._take(base + s) for s in _SCALE_NAMES if self.has(base + s)}
        if ".weight_scale_2" in scales:
            array = from_nvfp4(array, scales[".weight_scale"], scales[".weight_scale_2"])
        elif scales:
            array = from_fp8(array, next(iter(scales.values())))
        if array.size == _size(shape):
            array = array.reshape(shape)
        self._check(name, array.shape, shape)
        return array.astype(self.dtype)

    def _packed(self, base: str, n_out: int, n_in: int, bias: mx.array | None) -> Matrix:
        """A matrix that the checkpoint already holds in MLX's affine packing."""
        scales = self._take(f"{base}.scales").astype(self.dtype)
        if not self.has(f"{base}.biases"):
            raise LoadError(
                f'[{self.where}] "{base}.scales" must come with "{base}.biases" (MLX affine), got '
                "another quantisation. Convert the drafter in affine mode."
            )
        biases = self._take(f"{base}.biases").astype(self.dtype)
        name = f"{base}.weight" if self.has(f"{base}.weight") else base
        weight = self._take(name)
        group_size, bits = n_in // scales.shape[-1], weight.shape[-1] * 32 // n_in
        self._check(name, (weight.shape[0], weight.shape[-1] * 32 // max(bits, 1)), (n_out, n_in))
        if self._bits < 16:
            return Matrix(weight, bias, Quantised(scales, biases, group_size, bits))
        plain = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
        return Matrix(plain, bias)


def from_nvfp4(packed: mx.array, scale: mx.array, scale_2: mx.array) -> mx.array:
    """Dequantise NVFP4: E2M1 codes, low nibble first, one FP8 scale per 16, one global scale.

    Args:
        packed: Shape (out, in / 2), uint8.
        scale: Shape (out, in / 16), E4M3 bits in uint8, or floats.
        scale_2: One float.

    Returns:
        Shape (out, in), float32.
    """
    table = mx.array([*_E2M1, *(-x for x in _E2M1)])
    codes = mx.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    factor = _float8(scale) * scale_2.astype(mx.float32).reshape(1, 1)  # (out, in / 16)
    return table[codes] * mx.repeat(factor, 16, axis=1)


def from_fp8(weight: mx.array, scale: mx.array) -> mx.array:
    """Dequantise FP8 (E4M3) with a scale for all, per row, or per square block.

    Args:
        weight: Shape (out, in), E4M3 bits in uint8, or floats.
        scale: Shape (), (1,), (out,), (out, 1), or (out / b, in / b) rounded up.

    Returns:
        Shape (out, in), float32.
    """
    n_out, n_in = weight.shape
    scale = scale.astype(mx.float32)
    if scale.size == 1:
        scale = scale.reshape(1, 1)
    elif scale.size == n_out:
        scale = scale.reshape(n_out, 1)
    else:
        block = max(-(-n_out // scale.shape[0]), -(-n_in // scale.shape[1]))
        block = 1 << (block - 1).bit_length()  # a partial last block must not shrink it
        scale = mx.repeat(mx.repeat(scale, block, axis=0), block, axis=1)[:n_out, :n_in]
    return _float8(weight) * scale


def _float8(bits: mx.array) -> mx.array:
    return mx.from_fp8(bits, mx.float32) if bits.dtype == mx.uint8 else bits.astype(mx.float32)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
