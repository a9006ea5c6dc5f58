"""Rest: steps for which it is decided beforehand that nothing is drafted."""


class Rest:
    def __init__(self) -> None:
        self._num_left = 0  # steps
        self._share = 0.0  # of one sequence, in steps

    def begin(self, num_steps: int, num_sequences: int) -> None:
        """Rest for the next steps. num_sequences: of which it was decided."""
        self._num_left, self._share = num_steps, num_steps / num_sequences

    def takes_step(self) -> bool:
        """Return whether the next step is one of these, and count it."""
        if self._num_left <= 0:
            return False
        self._num_left -= 1
        return True

    def shorten(self) -> None:
        """Leave out the share of a sequence that ended: another takes its place, of which nothing is decided. So the
        only sequence of a worker is looked at from its beginning, and a request never costs more than a decision."""
        self._num_left -= round(self._share)
