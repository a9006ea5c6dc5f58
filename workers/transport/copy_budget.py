"""Limits how long a transport's thread copies while the engine computes: both want the memory's bandwidth. No I/O."""

import time

SHARE = 0.2  # of the time may go into copying,
BURST_S = 0.01  # and so much at once: enough for a hand-off's last segment, which its second token waits for


class CopyBudget:
    """Budget of one thread's copying. `is_sharing` (with an engine that computes) is set from any thread."""

    def __init__(self) -> None:
        self.is_sharing = False
        self.credit_s = BURST_S  # as of the moment `_credited_at` (time.monotonic())
        self._credited_at = 0.0

    def wait_s(self) -> float:
        """Number of seconds not to copy yet."""
        now = time.monotonic()
        self.credit_s = min(self.credit_s + SHARE * (now - self._credited_at), BURST_S)
        self._credited_at = now
        return -self.credit_s / SHARE if self.is_sharing and self.credit_s < 0 else 0.0

    def copied(self) -> None:
        """Count the time since the last `wait_s`, which went into copying."""
        if self.is_sharing:
            self.credit_s -= time.monotonic() - self._credited_at
