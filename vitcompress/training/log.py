"""log.jsonl: one JSON object per line and finished epoch, for machines; TensorBoard gets the same where installed."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitcompress.io.files import convert_write_errors, write_text
from vitcompress.io.run_folder import RunFolder


class RunLog:
    """The log at `path`. Lines of one `stage` (one training) are in the order of its epochs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, folder: Path) -> "RunLog":
        """The log of the run that a training's `folder` belongs to: next to the run's `state`, else in the folder."""
        runs = [parent.parent for parent in (folder, *folder.parents) if parent == RunFolder(parent.parent).state]
        return cls(RunFolder(runs[0] if runs else folder).log)

    def stage_of(self, folder: Path, label: str) -> str:
        """A name for the training that keeps its state in `folder`, unique within this log."""
        inside = folder.relative_to(self.path.parent).parts
        return "/".join(inside[1:] if inside[:1] == (RunFolder(folder).state.name,) else inside) or label

    def records(self) -> list[dict[str, Any]]:
        """All complete records; an unfinished line of a killed process is left out."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records

    def sync(self, stage: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Make the log's lines of `stage` those of its saved state, `records`; nothing is written when they are.

        A process killed between saving its state and writing its line leaves the two one epoch apart.
        """
        known, own = self.records(), [{"stage": stage, **record} for record in records]
        if [record for record in known if record.get("stage") == stage] == own:
            return
        kept = [record for record in known if record.get("stage") != stage]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in [*kept, *own]))

    def append(self, stage: str, record: Mapping[str, Any]) -> None:
        """Add one line. Raises OutputError when the disk is full."""
        with convert_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"stage": stage, **record}) + "\n")

    def tensorboard(self, stage: str, first_epoch: int) -> "Board":
        """A TensorBoard writer for `stage` that forgets epochs from `first_epoch` on; silent where not installed."""
        return Board(RunFolder(self.path.parent).tensorboard / stage, first_epoch)


class Board:
    """Scalars of one training for TensorBoard; without a folder, or without the package, nothing is written.

    Curves are for looking at, so one that cannot be written is left out: log.jsonl has the same figures, and says so
    when the disk is full.
    """

    def __init__(self, folder: Path | None, first_epoch: int) -> None:
        self.writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # an optional package
            return
        with suppress(OSError):
            # Ctrl-C while a value is handed to the writer's thread makes closing wait for that thread's next flush,
            # which would be two minutes away.
            self.writer = SummaryWriter(str(folder), purge_step=first_epoch, flush_secs=1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Every number of one epoch's record."""
        with suppress(OSError):
            for name, value in record.items() if self.writer else ():
                if isinstance(value, int | float) and name != "epoch":
                    self.writer.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        """Write what is buffered."""
        with suppress(OSError):
            if self.writer:
                self.writer.close()
