# SPDX-License-Identifier: Apache-2.0
"""The native extension and the GPU kernels. Everything else is in pyproject.toml.

Both are optional. Without a C compiler, or on another system than Linux, the package is installed
without the extension, moves stripes in Python, which is slower, and logs that when it starts.
Without Triton it has no kernels, and refuses KV caches on GPUs.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# One file serves every Python from 3.11 on; an older Python gets a file of its own.
STABLE_ABI = sys.version_info >= (3, 11)

SOURCES = {
    "_moves": ("module", "moves", "header", "xxh3", "packing", "tiles"),
    "_guard": ("guard",),
    "_copies": ("copies",),
    "_packing": ("packing_module", "packing", "tiles"),
}
HEADERS = ("moves", "header", "xxh3", "packing", "tiles")
KERNELS = "lmcache_redis/device/kernels"


class BuildExt(build_ext):
    """Makes the kernels too: in the checkout if it is installed as editable, else in the wheel."""

    def run(self) -> None:
        super().run()
        there = Path("" if self.inplace else self.build_lib, KERNELS)
        there.mkdir(parents=True, exist_ok=True)
        if subprocess.call([sys.executable, f"{KERNELS}/compile.py", there]):
            self.warn("the GPU kernels are not built: engines on GPUs will be refused")


class BuildPy(build_py):
    """Leaves out what is only for building."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        building = {f"{KERNELS}/{name}.py" for name in ("compile", "source")}
        return [each for each in found if each[2] not in building]


setup(
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    ext_modules=[
        Extension(
            f"lmcache_redis.native.{module}",
            [f"lmcache_redis/native/{name}.c" for name in names],
            depends=[f"lmcache_redis/native/{name}.h" for name in HEADERS],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
            py_limited_api=STABLE_ABI,
            optional=True,
        )
        for module, names in SOURCES.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
