"""The commands. Each one parses, calls one function and prints."""

import os
import signal
import threading


def _stop(*_: object) -> None:
    """Nothing has been started yet; and what PID 1 had started, the kernel ends with it."""
    os._exit(0)


# The kernel ignores a signal to a container's PID 1 that has no handler. `lifecycle.run_process` has one, but the
# imports before it take a second. Source: pid_namespaces(7).
if os.getpid() == 1 and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _stop)
