"""The function that mx.fast.metal_kernel generates around a kernel body, reproduced as text.

Facts: MLX 0.32.4. A test compares the result with MLX's own text, so that an upgrade cannot drift
unnoticed. Knows nothing about compiling or running it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

# Alphabetical, as MLX lists them.
ATTRIBUTES = (
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
)

SHAPE_PARTS = (
    ("shape", "const constant int*", "(const int*)b[{}]"),
    ("strides", "const constant int64_t*", "(const int64_t*)b[{}]"),
    ("ndim", "const constant int&", "*(const int*)b[{}]"),
)


@dataclass(frozen=True)
class Call:
    """One kernel and the arrays and constants it is called with.

    Attributes:
        name: as given to the factory.
        header: text before the function.
        source: its body.
        input_names: in order.
        inputs: the arrays.
        output_names: in order.
        output_dtypes: in order.
        template: names and values of the template parameters.
        atomic: whether outputs are atomic.
    """

    name: str
    header: str
    source: str
    input_names: Sequence[str]
    inputs: Sequence[mx.array]
    output_names: Sequence[str]
    output_dtypes: Sequence[mx.Dtype]
    template: Sequence[tuple[str, Any]]
    atomic: bool = False


@dataclass(frozen=True)
class Generated:
    """The text of one specialisation and how to call it.

    Attributes:
        body: header, function head, source, closing brace.
        instantiation: MLX's explicit instantiation, dropped before compiling.
        function: name of the function.
        arguments: template arguments, such as "<float, 4>", or "".
        buffers: what each buffer holds: ("in" | "shape" | "strides" | "ndim" | "out", index).
        parameters: C++ expression of each parameter, given `void** b`.
    """

    body: str
    instantiation: str
    function: str
    arguments: str
    buffers: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]


def _value(value: Any) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def _kind(value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _function_name(call: Call, arguments: str) -> str:
    name = "custom_kernel_" + call.name
    if arguments:
        hashed = arguments.replace(", ", "_").replace("<", "_").replace(">", "_")[:-1]
        name += "_" + hashed.replace("-", "_")
    for array in call.inputs:
        suffix = "s" if array.ndim == 0 else "c" if array.size < 8 else ""
        name += "_" + TYPES[array.dtype] + suffix
    return name + "".join("_" + TYPES[dtype] for dtype in call.output_dtypes)


def generate(call: Call) -> Generated:
    """The text mx.fast.metal_kernel compiles for `call`, without MLX's own helpers."""
    arguments = ""
    head = call.header
    if call.template:
        arguments = "<" + ", ".join(_value(v) for _, v in call.template) + ">"
        head += "template <" + ", ".join(f"{_kind(v)} {n}" for n, v in call.template) + ">\n"
    function = _function_name(call, arguments)
    head += f"[[kernel]] void {function}(\n"
    buffers: list[tuple[str, int]] = []
    parameters: list[str] = []
    for index, (name, array) in enumerate(zip(call.input_names, call.inputs, strict=True)):
        head += _input(call.source, name, array, index, buffers, parameters)
    attributes = [(name, kind) for name, kind in ATTRIBUTES if name in call.source]
    head += _outputs(call, buffers, parameters, bool(attributes))
    for index, (name, kind) in enumerate(attributes):
        head += f"  {kind} {name} [[{name}]]"
        head += ",\n" if index < len(attributes) - 1 else ") {\n"
        parameters.append(f"emu::a_{name}()")
    instantiation = ""
    if call.template:
        instantiation = (
            f'\ntemplate [[host_name("{function}")]] [[kernel]] '
            f"decltype({function}{arguments}) {function}{arguments};\n"
        )
    body = head + call.source + "\n}\n"
    return Generated(body, instantiation, function, arguments, tuple(buffers), tuple(parameters))


def _input(
    source: str,
    name: str,
    array: mx.array,
    index: int,
    buffers: list[tuple[str, int]],
    parameters: list[str],
) -> str:
    space = "constant" if array.size < 8 else "device"
    kind, scalar = TYPES[array.dtype], array.ndim == 0
    text = f"  const {space} {kind}{'&' if scalar else '*'} {name} [[buffer({len(buffers)})]],\n"
    parameters.append(f"{'*' if scalar else ''}(const {kind}*)b[{len(buffers)}]")
    buffers.append(("in", index))
    if scalar:
        return text
    for part, declaration, expression in SHAPE_PARTS:
        if f"{name}_{part}" in source:
            text += f"  {declaration} {name}_{part} [[buffer({len(buffers)})]],\n"
            parameters.append(expression.format(len(buffers)))
            buffers.append((part, index))
    return text


def _outputs(call: Call, buffers: list[tuple[str, int]], parameters: list[str], more: bool) -> str:
    text = ""
    for index, (name, dtype) in enumerate(zip(call.output_names, call.output_dtypes, strict=True)):
        kind = f"atomic<{TYPES[dtype]}>" if call.atomic else TYPES[dtype]
        text += f"  device {kind}* {name} [[buffer({len(buffers)})]]"
        # MLX counts only inputs and outputs here, not shapes: its text, bug included.
        last = len(buffers) >= len(call.inputs) + len(call.output_names) - 1
        text += ") {\n" if last and not more else ",\n"
        parameters.append(f"({kind}*)b[{len(buffers)}]")
        buffers.append(("out", index))
    return text
