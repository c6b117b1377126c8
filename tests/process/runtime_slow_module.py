"""Takes longer to import than anybody waits."""

import time

time.sleep(1000)
