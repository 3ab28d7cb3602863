"""Lesson 0. Maps stored tensors to parameters: checkpoints of one family name their tensors in several ways.

A file may leave out "model." or repeat it, hold the tied head in place of the embedding, or hold more than the text
model needs. transformers finds and ignores the same tensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)\.weight$")  # a matrix of one expert, stored apart from the others'
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # parameters that hold all experts'
RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # older files store RoPE's frequencies, which follow from config.json


class Place(NamedTuple):
    """The location of a stored parameter: the file, and the tensor's name in it."""

    path: Path
    name: str


class Stack(NamedTuple):
    """The location of a parameter whose entries are stored apart.

    name: the parameter's. entries: the places of each index of its first dimension, whose rows follow each other.
    """

    name: str
    entries: tuple[tuple[Place, ...], ...]

    @property
    def path(self) -> Path:
        """The file of its first tensor."""
        return self.entries[0][0].path


def parts_of(place: Place | Stack) -> list[Place]:
    """Return the places of all tensors that a parameter is read from."""
    return [place] if isinstance(place, Place) else [part for entry in place.entries for part in entry]


def parameter_of(name: str) -> str:
    """Return the parameter's name for a stored tensor's; "model." may be missing or repeated."""
    bare = name.removeprefix("model.")
    return bare if bare == HEAD or bare.startswith("model.") else f"model.{bare}"


def text_name(stored: str) -> str:
    """Return a tensor's name in a text model. With a vision tower it may be stored below "language_model."."""
    bare = stored.removeprefix("model.")
    inner = bare.removeprefix("language_model.")
    return stored if inner == bare else f"model.{inner}"


def place_parameters(
    found: Mapping[str, Path], is_tied: bool, renamed: Callable[[str], str] = str
) -> dict[str, Place | Stack]:
    """Map each parameter to its place.

    Args:
        found: the file of each stored tensor. is_tied: a lone head also serves as the embedding.
        renamed: maps the stored names of a family to the usual ones; `str` keeps them.
    """
    places: dict[str, Place] = {}
    for name in sorted(found):  # as in transformers: of two names for one parameter, the first counts
        places.setdefault(parameter_of(renamed(name)), Place(found[name], name))
    if is_tied and EMBEDDING not in places and HEAD in places:
        places[EMBEDDING] = places.pop(HEAD)
    return stacked(places) | places


def stacked(places: Mapping[str, Place]) -> dict[str, Place | Stack]:
    """Return the stacks that are complete: experts 0 … n - 1, each with all of a parameter's parts."""
    apart: dict[str, dict[tuple[int, str], Place]] = {}
    for name, place in places.items():
        if match := EXPERT.match(name):
            apart.setdefault(match[1], {})[int(match[2]), match[3]] = place
    found: dict[str, Place | Stack] = {}
    for prefix, matrices in apart.items():
        numbers = range(1 + max(number for number, _ in matrices))
        for stack, parts in STACKS.items():
            name, wanted = f"{prefix}.{stack}", [[(number, part) for part in parts] for number in numbers]
            if all(key in matrices for entry in wanted for key in entry):
                found[name] = Stack(name, tuple(tuple(matrices[key] for key in entry) for entry in wanted))
    return found


def unknown(names: Iterable[str], known: Iterable[str], ignored: tuple[str, ...]) -> list[str]:
    """Return the stored tensors that deserve a warning: neither known nor recomputed, and without an ignored prefix."""
    known = set(known)
    return sorted(n for n in names if n not in known and not n.startswith(ignored) and not RECOMPUTED.search(n))
