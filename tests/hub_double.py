"""A double of the Hugging Face hub: data sets of a directory, for the requests of `huggingface_hub`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.http_double import JsonHandler, serving

COMMIT = "c0ffee" + "0" * 34
REVISIONS = ("main", COMMIT)


class HubHandler(JsonHandler):
    """`root` has a folder `owner/name` for each data set. `asked` are the paths of all requests."""

    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = unquote(self.rfile.read(int(self.headers.get("content-length") or 0)).decode())
        self.take(self.path, {"body": body})

    def take(self, path: str, given: dict[str, Any]) -> None:
        self.asked.append(path)
        path = unquote(path)
        if found := re.fullmatch(
            r"/api/datasets/([\w.-]+/[\w.-]+)(?:/(revision|tree|paths-info)/(.+))?", path
        ):
            self._about(
                self.root / found[1], found[2] or "revision", found[3] or "main", given.get("body", "")
            )
        elif found := re.fullmatch(r"/datasets/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._file(self.root / found[1], found[2], found[3])
        else:
            self._refuse("EntryNotFound")

    def _about(self, directory: Path, what: str, rest: str, body: str) -> None:
        revision, _, below = rest.partition("/")
        files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
        entries = [_entry(directory, file) for file in files]
        if not directory.is_dir():
            self._refuse("RepoNotFound")
        elif revision not in REVISIONS:
            self._refuse("RevisionNotFound")
        elif what == "revision":
            siblings = [{"rfilename": one["path"]} for one in entries]
            self.answer({"id": directory.name, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif what == "tree":
            self.answer([one for one in entries if one["path"].startswith(below)])
        else:
            self.answer([one for one in entries if f"paths={one['path']}" in body.split("&")])

    def _file(self, directory: Path, revision: str, name: str) -> None:
        if not directory.is_dir():
            return self._refuse("RepoNotFound")
        if revision not in REVISIONS:
            return self._refuse("RevisionNotFound")
        if not (directory / name).is_file():
            return self._refuse("EntryNotFound")
        data = (directory / name).read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        first, last = (int(part[1]), int(part[2] or len(data) - 1)) if part else (0, len(data) - 1)
        body = data[first : last + 1]
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(directory: Path, file: Path) -> dict[str, Any]:
    oid = hashlib.sha1(file.read_bytes()).hexdigest()
    return {"type": "file", "path": str(file.relative_to(directory)), "size": file.stat().st_size, "oid": oid}


@contextmanager
def hub(root: Path, asked: list[str]) -> Iterator[str]:
    """The URL of a hub with the data sets below `root`."""
    with serving(HubHandler, root=root, asked=asked) as url:
        yield url
