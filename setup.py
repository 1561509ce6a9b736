"""The native extension, `lmcache_redis.native`. Everything else is in pyproject.toml.

It is optional: without a C compiler, or on another system than Linux, the package is installed
without it, moves stripes in Python, which is slower, and logs that when it starts.
"""

import sys

from setuptools import Extension, setup

# One file serves every Python from 3.11 on; an older Python gets a file of its own.
STABLE_ABI = sys.version_info >= (3, 11)

SOURCES = {"_moves": ("module", "moves", "xxh3"), "_guard": ("guard",)}

setup(
    ext_modules=[
        Extension(
            f"lmcache_redis.native.{module}",
            [f"lmcache_redis/native/{name}.c" for name in names],
            depends=[f"lmcache_redis/native/{name}.h" for name in ("moves", "xxh3")],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
            py_limited_api=STABLE_ABI,
            optional=True,
        )
        for module, names in SOURCES.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
