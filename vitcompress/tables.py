"""Tables of text, for a terminal and for Markdown."""

import re
from dataclasses import dataclass

NOT_MEASURED = "not measured"
NONE = "-"


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, to be drawn by whoever shows it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        head = [self.columns, tuple("---:" if self._figures(i) else "---" for i in range(len(self.columns)))]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [*head, *self.rows]
        )

    def _figures(self, column: int) -> bool:
        """Whether a column stands right: figures do, words, hashes and the first column do not."""
        cells = [row[column] for row in self.rows if row[column] not in ("", NOT_MEASURED, NONE)]
        return column > 0 and self.columns[column] != "sha256" and all(re.match(r"[+-]?\d", cell) for cell in cells)
