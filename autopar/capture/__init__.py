"""From a module and one example batch to a `Program`."""

from autopar.capture.export import capture
from autopar.capture.inputs import example_of
from autopar.capture.reference import call_program, run_program

__all__ = ["call_program", "capture", "example_of", "run_program"]
