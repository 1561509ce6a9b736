# SPDX-License-Identifier: Apache-2.0
"""What this package believes of the driver's binary interface, against NVIDIA's own headers.

The package `nvidia-cuda-runtime` carries ``cuda.h``, of CUDA 12.8 and of 13. A C compiler says how
wide each argument is, how structures are laid out, and which numbers names have. Functions are
compared by the symbols that ``libcuda.so.1`` exports: ``cuMemcpyBatchAsync`` is that of CUDA 12.8
there, whatever a header of CUDA 13 makes of the name.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.device import driver
from tests import cuda_driver

pytestmark = pytest.mark.skipif(bool(cuda_driver.missing()), reason=str(cuda_driver.missing()))

# Of functions with arguments of one type, of which no width tells the order: the order in which a
# call of `driver` gives them.
ARGUMENTS = {
    "cuDeviceGetName": "name len dev",
    "cuDeviceGetAttribute": "pi attrib dev",
    "cuMemGetAddressRange_v2": "pbase psize dptr",
    "cuMemExportToShareableHandle": "shareableHandle handle handleType flags",
    "cuMemAddressReserve": "ptr size alignment addr flags",
    "cuMemAddressFree": "ptr size",
    "cuMemMap": "ptr size offset handle flags",
    "cuMemUnmap": "ptr size",
    "cuMemSetAccess": "ptr size desc count",
    "cuStreamWriteValue64_v2": "stream addr value flags",
    "cuEventRecord": "hEvent hStream",
    "cuMemcpyHtoDAsync_v2": "dstDevice srcHost ByteCount hStream",
    "cuMemcpyDtoHAsync_v2": "dstHost srcDevice ByteCount hStream",
    "cuMemcpyBatchAsync": "dsts srcs sizes count attrs attrsIdxs numAttrs failIdx hStream",
    "cuLaunchKernel": "f gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes "
    "hStream kernelParams extra",
}

# Structures, with what their fields are called in C.
STRUCTURES: dict[str, tuple[type[ctypes.Structure], str]] = {
    "CUipcMemHandle": (driver._IpcHandle, "reserved"),
    "CUmemAccessDesc": (driver._Access, "location.type location.id flags"),
    "CUmemAllocationProp": (
        driver.AllocationProperties,
        "type requestedHandleTypes location.type location.id win32HandleMetaData allocFlags",
    ),
    "CUmemcpyAttributes": (
        driver._BatchAttributes,
        "srcAccessOrder srcLocHint.type srcLocHint.id dstLocHint.type dstLocHint.id flags",
    ),
}

ENUMERATORS = {
    "CU_MEMHOSTALLOC_PORTABLE": driver._PORTABLE,
    "CU_MEMHOSTREGISTER_PORTABLE": driver._PORTABLE,
    "CU_MEMHOSTREGISTER_DEVICEMAP": driver._DEVICE_MAP,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": driver._LAZY_PEER_ACCESS,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": driver._FILE_DESCRIPTOR,
    "CU_MEM_LOCATION_TYPE_DEVICE": driver._ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": driver._READ_WRITE,
    "CU_STREAM_NON_BLOCKING": driver._NON_BLOCKING,
    "CU_STREAM_WRITE_VALUE_DEFAULT": 0,
    "CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING": driver._EVENT_FLAGS,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": driver._STREAM_ORDER,
}

POINTER, INTEGER, STRUCTURE = 5, 1, 12  # of GCC's __builtin_classify_type


class Header:
    """A ``cuda.h`` as the compiler reads it.

    functions: of each symbol, the types of its arguments in C, and their names.
    """

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self._directory = path.parent
        # The names that the library exports, not those that programs are given.
        self._flags = ["-std=gnu11", "-w", "-D__CUDA_API_VERSION_INTERNAL", f"-I{path.parent}"]
        expanded = self._compile("#include <cuda.h>\n", "-E", "-P")
        self.functions: dict[str, list[tuple[str, str]]] = {}
        for name, arguments in re.findall(r"CUresult (cu\w+)\(([^)]*)\)", expanded):
            self.functions[name] = [_argument(each) for each in arguments.split(",")]

    def asserts(self, conditions: Iterator[tuple[str, str]]) -> None:
        """Fails with the texts of those that do not hold: a condition in C, and what it means."""
        lines = [f'_Static_assert({condition}, "{text}");' for condition, text in conditions]
        assert lines
        self._compile("\n".join(["#include <cuda.h>", *lines, ""]), "-c")

    def _compile(self, source: str, *flags: str) -> str:
        with tempfile.TemporaryDirectory() as name:
            (code, made), errors = (Path(name, n) for n in ("in.c", "out")), Path(name, "errors")
            code.write_text(source)
            words = ["gcc", *self._flags, *flags, str(code), "-o", str(made)]
            to = (os.POSIX_SPAWN_OPEN, 2, str(errors), os.O_WRONLY | os.O_CREAT, 0o600)
            # A unit test starts no process by `subprocess`; the compiler is what is asked here.
            pid = os.posix_spawnp(words[0], words, os.environ, file_actions=[to])
            status = os.waitpid(pid, 0)[1]
            assert status == 0, errors.read_text()
            return made.read_text(errors="replace")


def _argument(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"\s*(.*?)(\w+)\s*", text, re.DOTALL)
    assert found, text
    return found[1].strip() or found[2], found[2]


@cache
def header_of(distribution: str) -> Header:
    try:
        found = [each for each in files(distribution) or () if each.name == "cuda.h"]
    except PackageNotFoundError:
        pytest.skip(f"no {distribution}, which carries cuda.h: it is in the extra `test`")
    return Header(Path(str(found[0].locate())))


@pytest.fixture(params=["nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"], ids=["12", "13"])
def header(request: pytest.FixtureRequest) -> Header:
    return header_of(request.param)


def kind_and_bytes(given: Any) -> tuple[int, int]:
    """Of a type of ctypes."""
    kind = STRUCTURE if issubclass(given, ctypes.Structure) else INTEGER
    if given in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(given, "contents"):
        kind = POINTER
    return kind, ctypes.sizeof(given)


def test_each_function_takes_what_it_is_given(header: Header) -> None:
    """Count, order and width of the arguments, and which of them are addresses."""

    def conditions() -> Iterator[tuple[str, str]]:
        for function, types in driver._FUNCTIONS.items():
            arguments = header.functions[function]
            if len(set(types)) < len(types):
                assert " ".join(name for _, name in arguments) == ARGUMENTS[function]
            if arguments == [("void", "void")]:
                arguments = []
            assert len(arguments) == len(types), function
            for (written, name), given in zip(arguments, types, strict=True):
                kind, size = kind_and_bytes(given)
                text = f"{function}, {name}: {written} for {given.__name__}"
                yield f"sizeof({written}) == {size}", text
                yield f"__builtin_classify_type(*({written} *)0) == {kind}", text

    header.asserts(conditions())


def test_functions_of_the_tests_driver_take_the_same(header: Header) -> None:
    """Else it would hide a mistake of `driver`."""
    widths = {"unsigned": 4, "int": 4, "Result": 4, "unsigned char": 1, "Handle": 64}

    def conditions() -> Iterator[tuple[str, str]]:
        for source in sorted(cuda_driver.HERE.glob("*.c")):
            found = re.findall(
                r"^EXPORT Result (cu\w+)\(([^)]*)\)", source.read_text(), re.MULTILINE
            )
            for function, text in found:
                ours = [_argument(each) for each in text.split(",")]
                theirs = header.functions[function]
                assert len(ours) == len(theirs), function
                for (our, name), (their, _) in zip(ours, theirs, strict=True):
                    what = f"{function}, {name}: {our} for {their}"
                    if our == "void":
                        assert their == "void", what
                        continue
                    wide = 8 if our.endswith("*") else widths.get(our, 8)
                    yield f"sizeof({their}) == {wide}", what

    header.asserts(conditions())


def test_structures_are_laid_out_as_in_c(header: Header) -> None:
    def conditions() -> Iterator[tuple[str, str]]:
        for name, (ours, fields) in STRUCTURES.items():
            yield f"sizeof({name}) == {ctypes.sizeof(ours)}", f"{name} has another size"
            for (our, *_), their in zip(ours._fields_, fields.split(), strict=True):
                field = getattr(ours, our)
                text = f"{name}.{their}"
                yield f"__builtin_offsetof({name}, {their}) == {field.offset}", text
                yield f"sizeof((({name} *)0)->{their}) == {field.size}", text

    header.asserts(conditions())


def listed(file: str, pattern: str) -> dict[int, str]:
    """The names of numbers in a source of the tests' driver."""
    found = re.findall(pattern, (cuda_driver.HERE / file).read_text())
    return {int(number): name for number, name in found}


def test_names_have_the_numbers_that_are_used(header: Header) -> None:
    attributes = listed("devices.c", r"case (\d+): +/\* (\w+) \*/")
    errors = listed("errors.c", r'\{(\d+), "(\w+)"\}')
    names = {f"CU_DEVICE_ATTRIBUTE_{name}": number for number, name in attributes.items()}
    names |= {name: number for number, name in errors.items()}
    header.asserts((f"({name}) == {value}", name) for name, value in (ENUMERATORS | names).items())
    used = {value for value in vars(driver.Attribute).values() if isinstance(value, int)}
    assert used <= attributes.keys()
    assert driver._CAUSES.keys() | driver._STICKY <= errors.keys()


def test_a_process_ends_after_what_the_header_says_it_must(header: Header) -> None:
    """All but 911, of external semaphores, which nothing here has."""
    listed = header.text.partition("typedef enum cudaError_enum")[2].partition("} CUresult")[0]
    said = {
        int(code)
        for text, code in re.findall(r"/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)", listed, re.DOTALL)
        if "terminated and relaunched" in re.sub(r"[\s*]+", " ", text)
    }
    assert {226, 700, 719} < said
    assert said - {911} <= driver._STICKY
