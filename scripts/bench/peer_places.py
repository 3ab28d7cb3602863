"""Course machinery. For suites `peers` and `serving`: where the other engines are installed on this machine.

Each has an option and an environment variable. An engine whose place is not given is left out, with that reason.
"""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.peer_protocol import PeerError


class Place(NamedTuple):
    """An engine's option: its name, metavar, environment variable and help."""

    option: str
    metavar: str
    variable: str
    words: str


VLLM, LLAMA, OPENVINO = "vllm", "llama.cpp", "openvino"
PLACES = {
    VLLM: Place("--vllm-python", "PYTHON", "MINI_ENGINE_VLLM_PYTHON", "Python that has vLLM"),
    LLAMA: Place("--llama-cpp", "DIR", "MINI_ENGINE_LLAMA_CPP", "llama.cpp's sources, built into their folder build"),
    OPENVINO: Place(
        "--openvino-python", "PYTHON", "MINI_ENGINE_OPENVINO_PYTHON", "Python that has openvino-genai, optimum-intel"
    ),
}


def add_places(parser: ArgumentParser, *names: str) -> None:
    """Add the options of these engines; of all by default."""
    for name in names or PLACES:
        option, metavar, variable, words = PLACES[name]
        said = f"{words} (default: ${variable})"
        parser.add_argument(option, metavar=metavar, dest=attribute(name), help=said)


def attribute(name: str) -> str:
    """Return the name that an engine's place has in the parsed arguments."""
    return f"place_of_{name.replace('.', '_')}"


def place_of(name: str, args: Namespace) -> str:
    """Return an engine's place.

    Raises:
        PeerError: none was given.
    """
    place = PLACES[name]
    if found := getattr(args, attribute(name), None) or os.environ.get(place.variable):
        return found
    raise PeerError(f"no place was given; use {place.option} {place.metavar} or set {place.variable}")


def vllm_python(args: Namespace) -> tuple[str, dict[str, str]]:
    """Return the Python that has vLLM, and the variables that its documentation advises.

    Raises:
        PeerError: none was named.
    """
    python = place_of(VLLM, args)
    threads = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    return python, {"LD_PRELOAD": str(threads)} if threads.is_file() else {}


def places_given(args: Namespace) -> list[str]:
    """Return the options that hand the places in `args` on to another command."""
    options: list[Any] = []
    for name, place in PLACES.items():
        if found := getattr(args, attribute(name), None):
            options += [place.option, found]
    return options
