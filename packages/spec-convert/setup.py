"""The compiled loop, which is optional: without it numpy does the work, slower, to the same bits.

SPEC_CONVERT_LOOP=none leaves it out and makes a wheel for any platform; SPEC_CONVERT_LOOP=required
stops a build in which it does not compile. Everything else is in pyproject.toml.
"""

import os
import sys
import sysconfig
from tempfile import TemporaryDirectory

from setuptools import Extension, setup

CHOICES = ("optional", "none", "required")
choice = os.environ.get("SPEC_CONVERT_LOOP", CHOICES[0])
if choice not in CHOICES:
    raise SystemExit(f'[setup] SPEC_CONVERT_LOOP must be one of {CHOICES}, got "{choice}".')
# The stable ABI is CPython's, and its builds without a lock have none.
able = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
modules: list[Extension] = []
wheel: dict[str, str] = {}
if choice != "none" and able and sys.byteorder == "little":
    loop = Extension(
        "spec_convert._loop",
        ["src/spec_convert/_loop.c"],
        extra_compile_args=[] if os.name == "nt" else ["-O3"],
        py_limited_api=True,
        optional=choice == "optional",
    )
    modules, wheel = [loop], {"py_limited_api": "cp311"}
with TemporaryDirectory() as folder:  # nothing of an earlier build gets into this one
    setup(ext_modules=modules, options={"bdist_wheel": wheel, "build": {"build_base": folder}})
