"""State that no snapshot finds: attributes in slots."""


class Hidden:
    """Counts calls where no snapshot looks."""

    __slots__ = ("calls", "value")

    def __init__(self):
        self.calls = []
        self.value = 0.0

    def next(self):
        self.value += 1.0
        return self.value
