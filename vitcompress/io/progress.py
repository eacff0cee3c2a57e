"""The interface through which long work reports its progress; only `console` knows how that looks."""


class Progress:
    """Silent by default; `console.ConsoleProgress` draws it."""

    def stage(self, title: str) -> None:
        """A new part of the work begins."""

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        """`done` of `total` units of the part called `label` are finished; `text` is its newest figure."""

    def note(self, text: str) -> None:
        """One line that a person should read."""
