"""Probe tasks: small streams of sequences that tell what a recurrence can express and learn."""

from .protocol import PROTOCOLS, SELECTIONS, WORDS, Protocol
from .record import Record
from .registry import MODELS, TASKS, Model
from .run import Check, Result, evaluate, probe
from .tagger import Tagger
from .task import Batch, Evaluation, Task

__all__ = [
    "MODELS",
    "PROTOCOLS",
    "SELECTIONS",
    "TASKS",
    "WORDS",
    "Batch",
    "Check",
    "Evaluation",
    "Model",
    "Protocol",
    "Record",
    "Result",
    "Tagger",
    "Task",
    "evaluate",
    "probe",
]
