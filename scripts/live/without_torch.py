"""Course machinery. Placeholders for the tensor and web libraries, which are missing in a page.

The engine's decisions need no tensors, but some share a module with code that does. With placeholders these modules can
be imported; computing with one raises NotInThePage. So does lesson 7's server, whose modules describe the bodies of
requests while they are imported.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from scripts.live.small.strided import missing
from scripts.live.small_torch import SMALL
from scripts.live.small_web import WEB

LIBRARIES = ("torch", "safetensors", "tokenizers")
WEB_LIBRARIES = ("fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "jinja2", "prometheus_client")
MODULES = {".".join(name.split(".")[:end]) for name in SMALL for end in range(1, name.count(".") + 2)}


class Absent(type):
    """The metaclass of placeholders, which can only serve as annotations, base classes and decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(cls)(f"{cls.__qualname__}.{name}", (), {})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        names = all(isinstance(argument, str) for argument in arguments)  # torch.device("cpu")
        decorates = len(arguments) == 1 and isinstance(arguments[0], FunctionType)
        if decorates and not options:
            return arguments[0]
        if names:  # @torch.inference_mode() has none
            return cls
        raise missing(cls.__qualname__)


class Descriptive(Absent):
    """The metaclass of the web libraries' placeholders, which may be called to describe something: `Field(gt=8)`."""

    def __new__(mcs, name: str, bases: tuple, body: dict[str, Any], **options: Any) -> Any:  # class Body(Base, extra=…)
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple, body: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, body)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls.__bases__ != (object,):  # the course's own class below a placeholder
            return super().__call__(*arguments, **options)
        decorates = len(arguments) == 1 and isinstance(arguments[0], FunctionType) and not options
        return arguments[0] if decorates else cls


def placeholder(name: str) -> Absent:
    kind = Descriptive if name.partition(".")[0] in WEB_LIBRARIES else Absent
    return kind(name, (), {})


class AbsentModule(ModuleType):
    """A module in which every name is a placeholder, except for those that `small_torch` has."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in (small := SMALL.get(self.__name__, {})):
            return small[name]
        if (module := f"{self.__name__}.{name}") in MODULES:
            return import_module(module)
        if self.__name__.partition(".")[0] in ("fastapi", "starlette") and name in WEB:
            return WEB[name]
        return placeholder(f"{self.__name__}.{name}")


class Finder(Loader):
    """A meta-path finder for the libraries and their submodules."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(name, Finder()) if name.partition(".")[0] in LIBRARIES + WEB_LIBRARIES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Install placeholders for the missing libraries. Idempotent."""
    if find_spec("torch") is None:
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
