"""Course machinery. Modes that see each operation, with which tests count copies, concatenations and reads."""

import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from scripts.live.small.strided import missing

MODES: list["Mode"] = []  # that are active, the innermost last
UNSEEN = {  # methods that are no operations
    "made", "seen", "overlaps", "need_numbers", "is_floating_point", "fill_at", "filled_in", "parted", "sliced",
    "spots", "read_as", "dim", "size", "stride", "numel", "element_size", "storage_offset", "untyped_storage",
    "data_ptr", "is_contiguous", "requires_grad_", "view_as", "__init__", "__getattr__", "__hash__", "__repr__",
    "__format__", "__len__", "__deepcopy__",
}  # fmt: skip
CROSSING = {"copy_", "copy", "to", "__getitem__", "__setitem__"}  # these take tensors of several devices


class Call:
    """An operation, as a mode gets it. When it runs, the modes around this one see it, and none what it calls."""

    is_running = False

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__, self.function = name, function

    def __getattr__(self, name: str) -> Any:
        raise missing(f"torch's own record of an operation ({name})")

    @property
    def overloadpacket(self) -> "Call":
        return self

    def __call__(self, *given: Any, **more: Any) -> Any:
        if MODES:
            return self.shown(given, more)
        Call.is_running = True
        try:
            return self.function(*given, **more)
        finally:
            Call.is_running = False

    def shown(self, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Show the innermost mode this call; it sees no other meanwhile."""
        mode = MODES.pop()
        try:
            return mode.see(self, (), given, more)
        finally:
            MODES.append(mode)


class Mode:
    """torch's modes for functions and for dispatch; here both see the same operations."""

    def __enter__(self) -> "Mode":
        MODES.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        MODES.pop()

    def see(self, call: Call, types: tuple[()], given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        handlers = (getattr(self, f"__torch_{kind}__", None) for kind in ("function", "dispatch"))
        handler: Any = next(filter(None, handlers))
        return handler(call, types, given, more)


class StorageWeakRef:
    """A reference to a tensor's memory that does not keep it alive."""

    def __init__(self, storage: Any) -> None:
        self.place, self.memory = storage.data_ptr(), weakref.ref(storage.raw.obj)

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, StorageWeakRef) and self.memory() is other.memory() and self.place == other.place

    def expired(self) -> bool:
        return self.memory() is None


def leaves(tree: Any) -> list[Any]:
    """Return what is in nested lists, tuples and dicts."""
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)] if isinstance(tree, (dict, list, tuple)) else [tree]


def need_one_device(operands: tuple[Any, ...]) -> None:
    """Raise RuntimeError if tensors are on two devices. A tensor without dimensions may be anywhere."""
    devices = {one.device for one in operands if getattr(one, "strides", ())}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: {names}")


def carried(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that modes see, and that says so if it is asked for something that it does not have here."""
    call = Call(name, function)

    @wraps(function)
    def run(*given: Any, **more: Any) -> Any:
        if name not in CROSSING:
            need_one_device((*given, *more.values()))
        try:
            return call.shown(given, more) if MODES and not Call.is_running else function(*given, **more)
        except TypeError:
            try:
                signature(function).bind(*given, **more)
            except TypeError:
                raise missing(f"torch.{name} with these arguments") from None
            raise

    return run
