"""GGUF files to folders of safetensors, without losing a bit where the format allows it."""

from spec_convert.complete import is_complete
from spec_convert.convert import convert
from spec_convert.errors import ConvertError
from spec_convert.report import Report, TensorReport
from spec_convert.verify import Comparison, verify

__all__ = [
    "Comparison",
    "ConvertError",
    "Report",
    "TensorReport",
    "convert",
    "is_complete",
    "verify",
]
