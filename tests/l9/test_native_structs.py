"""Lesson 9. Python's structs match those in C++: the same fields, in the same order, of the same types."""

import ctypes
import re
from pathlib import Path

import pytest

import mini_engine
from mini_engine.attention.cpu import AttentionSizes
from mini_engine.layers import native

PACKAGE = Path(mini_engine.__file__).parent
STRUCTS = {
    AttentionSizes: "attention/paged_cpu.h",
    native.Matrix: "layers/linear.h",
    native.Shape: "layers/layers.cpp",
    native.Layer: "layers/layers.cpp",
    native.Place: "layers/pool.h",
    native.Step: "layers/layers.cpp",
    native.Cache: "layers/pool.h",
    native.Pool: "layers/pool.h",
}
NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


def fields_in_cpp(name: str, source: str) -> list[tuple[str, str]]:
    """Return (field, type) for each field of `struct name` in C++ source; a pointer's type is "pointer"."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", re.sub(r"//.*", "", source), re.DOTALL | re.MULTILINE)
    assert body, f"there is no struct {name}"
    found = []
    for declaration in filter(None, map(str.strip, body[1].split(";"))):
        kind = declaration.removeprefix("const ").split()[0]
        for part in declaration.split(","):
            found.append((re.findall(r"\w+", part)[-1], "pointer" if "*" in part else kind))
    return found


def kind_of(ctype: type) -> str:
    """Return the type's name, as in `fields_in_cpp`."""
    if ctype is ctypes.c_void_p or issubclass(ctype, ctypes._Pointer):
        return "pointer"
    return next((name for name, number in NUMBERS.items() if number is ctype), ctype.__name__)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_python_and_cpp_agree_on_every_field(struct):
    in_cpp = fields_in_cpp(struct.__name__, (PACKAGE / STRUCTS[struct]).read_text(encoding="utf-8"))
    in_python = [(name, kind_of(ctype)) for name, ctype in struct._fields_]
    assert in_python == in_cpp, f"{struct.__name__}: C++ would read the bytes of one field as another"
