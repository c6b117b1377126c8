"""Which torch `scripts/setup` installs. The programs of the virtual environment only take notes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT

# A note is a call. `show` tells whether torch is installed; without an index, only that one fits.
PIP = """#!/bin/sh
echo "pip $*" >> notes
case "$*" in
  "show -qq torch") exit {shown} ;;
  *--no-index*">=2.11,<2.16") exit {fits} ;;
  *--no-index*) exit 1 ;;
esac
"""


def notes(directory: Path, *, shown: int, fits: int) -> list[str]:
    """The calls of pip and uv in a setup on a machine without a GPU."""
    programs = directory / ".venv" / "bin"
    programs.mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", directory / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {
        "pip": PIP.format(shown=shown, fits=fits),
        "uv": '#!/bin/sh\necho "uv $*" >> notes\n',
        "millrace": "#!/bin/sh\n",
        "nvidia-smi": "#!/bin/sh\nexit 1\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    subprocess.run([directory / "scripts" / "setup"], env={"PATH": path}, check=True, capture_output=True)
    return (directory / "notes").read_text().splitlines()


def test_a_torch_that_fits_is_kept(tmp_path):
    assert not [call for call in notes(tmp_path, shown=0, fits=0) if "torch-backend" in call]


@pytest.mark.parametrize(("shown", "fits"), [(1, 0), (1, 1), (0, 1)])
def test_another_torch_or_none_becomes_the_build_without_cuda(shown, fits, tmp_path):
    [install] = [call for call in notes(tmp_path, shown=shown, fits=fits) if "torch-backend=cpu" in call]
    assert install.endswith("torch>=2.11,<2.14")
