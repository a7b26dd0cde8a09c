"""The exception tree.

Enters: a message that says what (node and the user's file:line), the numbers, the rule and the remedy, in one line.
Leaves: every error a user can cause, under `AutoparError`, so that one `except` catches ours and nothing else.
Refused: our own bugs; they stay `AssertionError`s with a traceback.
"""


class AutoparError(Exception):
    """Base of every error autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph; the message names the user's file and line."""


class UnsupportedOpError(AutoparError):
    """An op, or a use of it, that autopar cannot run in parallel with the same numbers."""


class RuleError(AutoparError):
    """A sharding rule is malformed, or does not fit the op it was registered for."""


class MeshError(AutoparError):
    """A topology, device profile or logical axis makes no sense, or does not fit the machine."""


class PlanError(AutoparError):
    """A plan, pin or plan file contradicts itself, the model or the mesh; the message names the field."""


class InfeasibleError(AutoparError):
    """No plan fits the devices' memory; the message says how many bytes are missing, where, and what would help."""


class RuntimeMismatchError(AutoparError):
    """Ranks disagree before or during a step: plan, shapes, values or versions; raised on every rank, never a hang."""
