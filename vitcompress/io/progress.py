"""How long work reports its progress; `cli.output.terminal` displays it."""


class Progress:
    """Ignores all reports; subclasses display them."""

    def stage(self, title: str) -> None:
        """Start a new part of the work."""

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        """Report that `done` of `total` units of the part `label` are finished. text: its latest figure."""

    def note(self, text: str) -> None:
        """Report one line of information."""


SILENT = Progress()  # reports nothing
