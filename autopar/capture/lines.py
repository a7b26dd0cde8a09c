"""Where in the user's code an op was called, noted at a fraction of the price.

Enters: a trace that runs inside `user_lines`. Leaves: nodes whose `stack_trace` is one frame, the user's innermost
`forward`; all that torch writes where there is none. Refused: nothing.

torch walks every frame of every op and reads the text of its line, a tenth of the time of a trace; one file and line is
all that we read of it (`explain.where_of`).
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

from torch.fx import proxy
from torch.utils._traceback import CapturedTraceback

from autopar.capture.explain import is_user_file


class _OneFrame:
    """Stands for torch's captured stack: `extract().summary()`."""

    def __init__(self, frame: FrameType) -> None:
        # without the text of the line, which costs most
        self.frame = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward", line="")

    @staticmethod
    def extract() -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward" and is_user_file(frame.f_code.co_filename):
                return _OneFrame(frame)
            frame = frame.f_back
        return CapturedTraceback.extract(skip=1)

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([self.frame])


@contextlib.contextmanager
def user_lines() -> Iterator[None]:
    """While a model is traced."""
    with mock.patch.object(proxy, "CapturedTraceback", _OneFrame):
        yield
