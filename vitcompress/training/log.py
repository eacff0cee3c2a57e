"""log.jsonl: one JSON object per line and finished epoch, for machines; TensorBoard gets the same where installed."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitcompress.io.files import changing, convert_write_errors, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.training.options import EpochRecord


class RunLog:
    """The log of a run, to which the training `stage` adds one line per epoch."""

    def __init__(self, folder: Path, label: str) -> None:
        """The log is next to the nearest folder `state` of a run above `folder`, and the path below `state` names the
        training. Elsewhere it is in `folder`. label: names a training without such a path.
        """
        run = any(files.recipe.is_file() or files.settings.is_file() for files in map(RunFolder, folder.parents))
        state = next((part for part in (folder, *folder.parents) if run and part == RunFolder(part.parent).state), None)
        self.path = RunFolder(state.parent if state else folder).log
        self.stage = "/".join(folder.relative_to(state or folder).parts) or label
        self.board: Any = None

    def records(self) -> list[dict[str, Any]]:
        """All complete records; an unfinished line of a killed process is left out."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def sync(self, history: Sequence[EpochRecord]) -> None:
        """Replace the lines of this training by those of its saved state, if they differ.

        A process killed between saving its state and writing its line leaves the two one epoch apart.
        """
        known, own = self.records(), [{"stage": self.stage, **record} for record in history]
        if [record for record in known if record.get("stage") == self.stage] != own:
            kept = [record for record in known if record.get("stage") != self.stage]
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in [*kept, *own]))

    def open_board(self, first_epoch: int) -> None:
        """Write further records to TensorBoard too, where it is installed, and forget its epochs from `first_epoch` on.

        Curves that cannot be written are left out: log.jsonl has the same figures, and reports a full disk.
        """
        with suppress(ImportError, OSError):
            from torch.utils.tensorboard import SummaryWriter

            # Ctrl-C while a value is handed to the writer's thread makes closing wait for that thread's next flush,
            # which would be two minutes away.
            folder = RunFolder(self.path.parent).tensorboard / self.stage
            self.board = SummaryWriter(str(folder), purge_step=first_epoch, flush_secs=1)

    def append(self, record: EpochRecord) -> None:
        """Add one line, and its numbers to TensorBoard. Raises OutputError when the disk is full."""
        changing.get()(self.path)
        with convert_write_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps({"stage": self.stage, **record}) + "\n")
        with suppress(OSError):
            for name, value in record.items() if self.board else ():
                if isinstance(value, int | float) and name != "epoch":
                    self.board.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        """Close the writer of TensorBoard, which writes what it buffers."""
        with suppress(OSError):
            if self.board:
                self.board.close()
