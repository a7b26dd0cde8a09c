"""Pipeline schedules as tables of actions: built by name, checked without running, printed for people."""

from autopar.schedule.build import build
from autopar.schedule.check import Facts, check
from autopar.schedule.table import Action, Row, Schedule, parse

__all__ = ["Action", "Facts", "Row", "Schedule", "build", "check", "parse"]
