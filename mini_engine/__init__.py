"""Course machinery. The engine's front door: `from mini_engine import LLM, SamplingParams`.

Names are imported when they are first used, so that `import mini_engine` costs nothing and brings no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.assembly.engine_config import EngineConfig
    from mini_engine.assembly.llm import LLM
    from mini_engine.base.errors import UserError
    from mini_engine.engine.answer import TextDelta
    from mini_engine.engine.offline import Completion
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler_config import SchedulerConfig

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "SamplingParams",
    "SchedulerConfig",
    "TextDelta",
    "UserError",
    "__version__",
]

_HOMES = {
    "LLM": "mini_engine.assembly.llm",
    "Completion": "mini_engine.engine.offline",
    "EngineConfig": "mini_engine.assembly.engine_config",
    "SamplingParams": "mini_engine.engine.sampling_params",
    "SchedulerConfig": "mini_engine.engine.scheduler_config",
    "TextDelta": "mini_engine.engine.answer",
    "UserError": "mini_engine.base.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mini_engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
