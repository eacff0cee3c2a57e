"""One thread for all tests: the models are so small that a second one only waits, the longer the busier the machine."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script that starts the tests in the background (`pytest &`) has them ignore SIGINT, and with them every process that
# they start and interrupt: the tests of Ctrl-C would wait without end.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
