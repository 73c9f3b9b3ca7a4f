"""Runs the text of Metal kernels on a CPU: `metal_kernel` mirrors `mx.fast.metal_kernel`."""

from metal_emulator.build import missing_tools as missing_tools
from metal_emulator.errors import EmulatorError as EmulatorError
from metal_emulator.launch import Options as Options
from metal_emulator.launch import Report as Report
from metal_emulator.launch import last_report as last_report
from metal_emulator.launch import metal_kernel as metal_kernel
from metal_emulator.lint import lint as lint
from metal_emulator.signature import generate as generate
