"""Is the agent's process still there, and does it run? (Linux, same PID namespace.)"""

from __future__ import annotations

from enum import Enum

from lmcache_redis import messages as m


class ProcessState(Enum):
    """What /proc says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"


def process_state(pid: int, start_time: int) -> ProcessState:
    """The state of process ``pid`` that started at ``start_time`` (clock ticks since boot)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # Fields after the command, which is in parentheses and may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessState.GONE
    except OSError:
        return ProcessState.UNKNOWN
    if int(fields[19]) != start_time or fields[0] in (b"Z", b"X"):
        return ProcessState.GONE
    return ProcessState.STOPPED if fields[0] in (b"T", b"t") else ProcessState.RUNNING


class AgentProcess:
    """The process behind one welcome.

    Whether it can be seen from here is found out at once, while it surely lives: in another
    PID namespace its state stays UNKNOWN, and nothing is concluded from not finding it.
    """

    def __init__(self, welcome: m.Welcome) -> None:
        self._pid = welcome.agent_pid
        self._start_time = welcome.agent_start_time
        self._visible = self._look() in (ProcessState.RUNNING, ProcessState.STOPPED)

    def state(self) -> ProcessState:
        """What the process is doing now."""
        return self._look() if self._visible else ProcessState.UNKNOWN

    def _look(self) -> ProcessState:
        return process_state(self._pid, self._start_time)
