"""Pipeline schedules as tables of actions: built by name, checked without running, printed for people."""

from autopar.schedule.build import build
from autopar.schedule.table import Action, Row, Schedule

__all__ = ["Action", "Row", "Schedule", "build"]
