"""The process that fetches rows with `datasets`, and writes them as one Arrow file.

Its argument is JSON: the file, and the keys of `HubTaskSection`. Its last line on stdout is JSON: the classes
and the text of the error, both empty if there was none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.tasks.arrow import BATCH_ROWS, write_arrow


def fetch(
    *, file: str, name: str, subset: str | None, split: str, revision: str | None, rows_max: int | None
) -> None:
    """With `rows_max` the rows are streamed, and no file is fetched beyond them."""
    import huggingface_hub
    from datasets import load_dataset

    os.chdir("/")  # a directory of the same name is no data set of a hub
    keys = {"name": subset, "split": split}
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        rows = load_dataset(name, **keys, revision=revision, streaming=rows_max is not None)
    else:
        try:
            rows = load_dataset(name, **keys, revision=revision)
        except Exception:  # no rows that `datasets` has prepared: are there the files of the repository?
            directory = huggingface_hub.snapshot_download(
                name, repo_type="dataset", revision=revision, local_files_only=True
            )
            rows = load_dataset(directory, **keys)
    write_arrow(Path(file), _batches(rows, rows_max), rows_max)


def _batches(rows: Any, rows_max: int | None) -> Iterator[Any]:
    from datasets.utils import tqdm

    with tqdm(desc="Keeping rows", total=rows_max, unit=" rows") as progress:
        for batch in rows.with_format("arrow").iter(min(BATCH_ROWS, rows_max or BATCH_ROWS)):
            progress.update(batch.num_rows)
            yield batch


if __name__ == "__main__":
    said = ""
    try:
        fetch(**json.loads(sys.argv[1]))
    except Exception as error:
        said = str(error).strip() or type(error).__name__
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)  # streams leave threads behind, which would keep the process
