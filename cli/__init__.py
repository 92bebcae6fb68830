"""The commands. Each command parses its arguments, calls one function and prints."""

import os
import signal
import threading


def _stop(*_: object) -> None:
    """End at once. Nothing has been started yet, and the kernel ends every process of a PID 1 that ends."""
    os._exit(0)


# The kernel ignores a signal to a container's PID 1 that has no handler. `run_process` installs one, but the imports
# before it take a second. Source: pid_namespaces(7).
if os.getpid() == 1 and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _stop)
