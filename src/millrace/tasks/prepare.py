"""What takes long before rows can be read, done once by the process that starts workers.

A worker does the same if it has to, as on another host; but its start has a deadline.
"""

from __future__ import annotations

from millrace.config.carried import is_carried
from millrace.config.tables.task import FileTaskSection, HubTaskSection, Task
from millrace.core.errors import DataError, boundary
from millrace.tasks.arrow import mapped_parquet
from millrace.tasks.data_files import check_exists, format_of, row_files
from millrace.tasks.hub import fetched_file


def prepare_rows(task: Task) -> None:
    """Fetch the rows of a hub, and map large Parquet files.

    Raises: DataError: there are no such rows, or they cannot be read.
    """
    match task:
        case HubTaskSection():
            fetched_file(task)
        case FileTaskSection() if not is_carried(task.path):
            check_exists(task.path)
            for file in row_files(task.path):
                with boundary(str(file), "cannot be read", DataError):
                    if format_of(file) == ".parquet":
                        mapped_parquet(file)
