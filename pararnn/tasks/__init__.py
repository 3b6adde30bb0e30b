"""Probe tasks: small streams of sequences that tell what a recurrence can express and learn.

Names are loaded on first use, so that the command's parser needs no PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "protocol": (
        "PROTOCOLS",
        "SELECTIONS",
        "WORDS",
        "Protocol",
    ),
    "record": ("Record",),
    "registry": (
        "MODELS",
        "TASKS",
        "Model",
    ),
    "run": (
        "Check",
        "Result",
        "evaluate",
        "probe",
    ),
    "tagger": ("Tagger",),
    "task": (
        "Batch",
        "Evaluation",
        "Task",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from .protocol import PROTOCOLS as PROTOCOLS
    from .protocol import SELECTIONS as SELECTIONS
    from .protocol import WORDS as WORDS
    from .protocol import Protocol as Protocol
    from .record import Record as Record
    from .registry import MODELS as MODELS
    from .registry import TASKS as TASKS
    from .registry import Model as Model
    from .run import Check as Check
    from .run import Result as Result
    from .run import evaluate as evaluate
    from .run import probe as probe
    from .tagger import Tagger as Tagger
    from .task import Batch as Batch
    from .task import Evaluation as Evaluation
    from .task import Task as Task


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
