"""`spec convert`: the convert command of spec-convert; inspect and verify are `spec-convert`'s."""

from spec_convert.cli import convert_command as convert

__all__ = ["convert"]
