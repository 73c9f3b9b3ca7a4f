"""`spec convert`: the commands of spec-convert."""

from spec_convert.cli import cli as convert

convert.name = "convert"

__all__ = ["convert"]
