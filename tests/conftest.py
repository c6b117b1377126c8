"""Makes this folder importable, so that the tests of every backend share `conformance`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
