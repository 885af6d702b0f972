"""Whether the coming step will clip: then updates that begin before its norm is known are in vain."""

# A step that clips is 0.16 s longer where its updates began before the norm was known and were rolled back, one that
# does not clip 0.27 s longer where they waited for it (2.70B on an H200, docs/journal/offload.md).
LIKELY = 0.6
LATEST = 0.25  # the weight of the latest step


class Clipping:
    """What steps of one model did. ``share``: of those that followed one that clipped the part that did, too, of which
    the latest count most.
    """

    def __init__(self) -> None:
        self.share, self._last = 0.0, False

    @property
    def expected(self) -> bool:
        """Whether the coming step clips, as far as the last ones tell."""
        return self._last and self.share > LIKELY

    def end_step(self, *, clipped: bool) -> None:
        """A step is over."""
        if self._last:
            self.share += LATEST * (clipped - self.share)
        self._last = clipped
