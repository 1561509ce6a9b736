"""Whether a server is worth asking: a pure state machine, its time given by the caller."""

from __future__ import annotations

from dataclasses import dataclass

# A server that is up for less is unsteady: it is asked less often, and talked about less.
STEADY_AFTER_S = 5.0
_LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class Breaker:
    """DOWN until a probe is answered, UP until something fails for certain.

    While DOWN nothing but probes is sent, `next_probe_at` says when. While UP a heartbeat
    asks now and then, and at once when `suspected`. Times are monotonic seconds. Every
    method that can change `up` says whether it did, so that changes are told once. Up and
    down in quick succession (there are probes that succeed where workers fail, as when only
    one connection more is allowed) count as `unsteady` and lengthen the pause, to a second.
    """

    probe_interval_s: float
    heartbeat_s: float
    up: bool = False
    probed: bool = False
    reason: str = "Redis has not been asked yet"
    since: float = 0.0
    next_probe_at: float = 0.0
    unsteady: int = 0

    def answered(self, now: float) -> bool:
        """A probe was answered."""
        changed = not self.up
        if changed:
            self.since = now
            self.reason = ""
        self.up = True
        self.probed = True
        self.next_probe_at = now + self.heartbeat_s
        return changed

    def failed(self, now: float, reason: str, retry_after_s: float = 0.0) -> bool:
        """A probe, or something as certain as one, failed; not to be tried again too soon."""
        changed = self.up or not self.probed
        if self.up:
            self.unsteady = self.unsteady + 1 if now - self.since < STEADY_AFTER_S else 0
            self.since = now
        self.up = False
        self.probed = True
        self.reason = reason
        pause_s = min(self.probe_interval_s * 2 ** min(self.unsteady, 8), _LONGEST_PAUSE_S)
        self.next_probe_at = now + max(self.probe_interval_s, pause_s, retry_after_s)
        return changed

    def suspected(self, now: float) -> None:
        """An operation timed out, which a slow server does too: ask."""
        if self.up:
            self.next_probe_at = now
