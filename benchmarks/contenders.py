"""Who takes part, by name."""

from __future__ import annotations

from benchmarks import ours, rivals
from benchmarks.sides import Contender

CONTENDERS: dict[str, Contender] = {
    "in place": ours.InPlace(),
    "copied in": ours.CopiedIn(),
    "copied in, no supervisor": ours.CopiedInByLibrary(),
    "inline": ours.InlineFallback(),
    "send_pyobj, torch": rivals.SendPyobjTorch(),
    "send_pyobj, numpy": rivals.SendPyobjNumpy(),
    "pickle 5": rivals.Pickle5(),
    "pickle 5, unsafe": rivals.Pickle5Unsafe(),
    "msgpack frames": rivals.MsgpackFrames(),
    "msgpack frames, unsafe": rivals.MsgpackFramesUnsafe(),
    "msgpack frames, zmq.asyncio": rivals.MsgpackFramesAsyncio(),
    "msgpack frames, blocking": rivals.MsgpackFramesBlocking(),
    "torch queue": rivals.TorchQueue(),
    "torch queue, unsafe": rivals.TorchQueueUnsafe(),
}
OURS = frozenset(name for name, contender in CONTENDERS.items() if contender.__class__.__module__ == ours.__name__)
