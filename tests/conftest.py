"""One thread for all tests: the models are so small that a second one only waits, the longer the busier the machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
