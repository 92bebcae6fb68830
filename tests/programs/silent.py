"""Connects to a broker as often as it is told, and says nothing: `silent.py PATH TIMES`."""

from __future__ import annotations

import socket
import sys

path, times = sys.argv[1], int(sys.argv[2])
held = []
for _ in range(times):
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    held[-1].connect(path)
print("silent", flush=True)
sys.stdin.read()
