"""The compiled loop, which is optional: without it numpy does the work, slower, to the same bits.

SPEC_CONVERT_LOOP=none leaves it out and makes a wheel for any platform; SPEC_CONVERT_LOOP=required
stops a build in which it does not compile. Everything else is in pyproject.toml.
"""

import os
import sys
import sysconfig

from setuptools import Extension, setup

CHOICES = ("optional", "none", "required")
choice = os.environ.get("SPEC_CONVERT_LOOP", CHOICES[0])
if choice not in CHOICES:
    raise SystemExit(f'[setup] SPEC_CONVERT_LOOP must be one of {CHOICES}, got "{choice}".')
# The stable ABI is CPython's, and its builds without a lock have none.
able = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
if choice == "none" or not able or sys.byteorder != "little":
    setup()
else:
    loop = Extension(
        "spec_convert._loop",
        ["src/spec_convert/_loop.c"],
        extra_compile_args=[] if os.name == "nt" else ["-O3"],
        py_limited_api=True,
        optional=choice == "optional",
    )
    setup(ext_modules=[loop], options={"bdist_wheel": {"py_limited_api": "cp311"}})
