"""Where a cohort's clients are trained: in this process or in one worker process per core."""

from __future__ import annotations

from mycelia.simulations.backends.base import Backend, Failure, Outcomes
from mycelia.simulations.backends.inline import Inline
from mycelia.simulations.backends.replica import Task
from mycelia.simulations.backends.workers import Workers

__all__ = ["Backend", "Failure", "Inline", "Outcomes", "Task", "Workers"]
