"""tensorferry: an asyncio ZeroMQ pipeline that ferries tensors between the stages of a vision-language server.

All that a client, a plug-in or a user of the pools needs is here; other modules may move. The names below are imported
on first use, so that a process which only wants one of them does not pay for the others (the host pool, in particular,
imports without torch).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorferry.codecs.errors import AnswerFailed as AnswerFailed
    from tensorferry.codecs.errors import AttachRefused as AttachRefused
    from tensorferry.codecs.errors import BadItem as BadItem
    from tensorferry.codecs.errors import BadRequest as BadRequest
    from tensorferry.codecs.errors import BadTensor as BadTensor
    from tensorferry.codecs.errors import ConfigError as ConfigError
    from tensorferry.codecs.errors import DeploymentError as DeploymentError
    from tensorferry.codecs.errors import FerryError as FerryError
    from tensorferry.codecs.errors import LeaseNotReady as LeaseNotReady
    from tensorferry.codecs.errors import LeasePoisoned as LeasePoisoned
    from tensorferry.codecs.errors import NotStaged as NotStaged
    from tensorferry.codecs.errors import PeerGone as PeerGone
    from tensorferry.codecs.errors import PoolClosed as PoolClosed
    from tensorferry.codecs.errors import PoolFull as PoolFull
    from tensorferry.codecs.errors import StaleLease as StaleLease
    from tensorferry.codecs.errors import StreamCapturing as StreamCapturing
    from tensorferry.codecs.errors import StreamDiverged as StreamDiverged
    from tensorferry.codecs.errors import UnsupportedDtype as UnsupportedDtype
    from tensorferry.codecs.frames import open_inline as open_inline
    from tensorferry.codecs.memory.cuda_driver import CudaError as CudaError
    from tensorferry.codecs.memory.cuda_vmm import NoFabric as NoFabric
    from tensorferry.codecs.messages import Busy as Busy
    from tensorferry.codecs.messages import Failed as Failed
    from tensorferry.codecs.messages import Failure as Failure
    from tensorferry.codecs.messages import ItemReport as ItemReport
    from tensorferry.codecs.messages import Payload as Payload
    from tensorferry.codecs.messages import Proxy as Proxy
    from tensorferry.codecs.messages import Result as Result
    from tensorferry.codecs.messages import Sampling as Sampling
    from tensorferry.codecs.messages import TokenLogprob as TokenLogprob
    from tensorferry.codecs.pool.elastic.mail import Letter as Letter
    from tensorferry.codecs.pool.export import Attachment as Attachment
    from tensorferry.codecs.pool.export import Export as Export
    from tensorferry.codecs.pool.pool import Pool as Pool
    from tensorferry.codecs.pool.publisher import Publisher as Publisher
    from tensorferry.codecs.pool.reader import Reader as Reader
    from tensorferry.codecs.tensors import DTYPES as DTYPES
    from tensorferry.codecs.tensors import View as View
    from tensorferry.pipeline.client.answer_stream import AnswerStream as AnswerStream
    from tensorferry.pipeline.client.answer_stream import Outcome as Outcome
    from tensorferry.pipeline.client.client import Client as Client
    from tensorferry.pipeline.client.patience import submit_patiently as submit_patiently
    from tensorferry.pipeline.client.prompt_parts import Embeddings as Embeddings
    from tensorferry.pipeline.client.prompt_parts import Image as Image
    from tensorferry.pipeline.client.prompt_parts import Part as Part
    from tensorferry.pipeline.client.prompt_parts import Video as Video
    from tensorferry.pipeline.deployment.load import load as load
    from tensorferry.pipeline.deployment.spec import Deployment as Deployment
    from tensorferry.pipeline.deployment.spec import LimitsSpec as LimitsSpec
    from tensorferry.pipeline.deployment.spec import ModelSpec as ModelSpec
    from tensorferry.pipeline.deployment.spec import SchedulerSpec as SchedulerSpec
    from tensorferry.stages.adapters.base import Finish as Finish
    from tensorferry.stages.adapters.base import ItemInfo as ItemInfo
    from tensorferry.stages.adapters.base import Load as Load
    from tensorferry.stages.adapters.base import ModelAdapter as ModelAdapter
    from tensorferry.stages.adapters.base import Out as Out
    from tensorferry.stages.adapters.base import split as split
    from tensorferry.stages.adapters.fingerprint import fingerprint_of as fingerprint_of
    from tensorferry.stages.engines.base import Capacity as Capacity
    from tensorferry.stages.engines.base import Delta as Delta
    from tensorferry.stages.engines.base import Engine as Engine
    from tensorferry.stages.engines.base import EngineDied as EngineDied
    from tensorferry.stages.engines.base import EngineItem as EngineItem
    from tensorferry.stages.engines.base import EngineRequest as EngineRequest
    from tensorferry.stages.engines.base import EngineResult as EngineResult
    from tensorferry.stages.engines.base import StreamingEngine as StreamingEngine
    from tensorferry.stages.processors.base import AnimatedFile as AnimatedFile
    from tensorferry.stages.processors.base import BadMedia as BadMedia
    from tensorferry.stages.processors.base import Clip as Clip
    from tensorferry.stages.processors.base import Plan as Plan
    from tensorferry.stages.processors.base import Processor as Processor
    from tensorferry.stages.processors.base import VideoProcessor as VideoProcessor

__version__ = "0.1.0"

#: Module -> the names that come from it.
_NAMES = {
    "tensorferry.codecs.errors": (
        "AnswerFailed AttachRefused BadItem BadRequest BadTensor ConfigError DeploymentError FerryError LeaseNotReady "
        "LeasePoisoned NotStaged PeerGone PoolClosed PoolFull StaleLease StreamCapturing StreamDiverged "
        "UnsupportedDtype "
    ),
    "tensorferry.codecs.frames": "open_inline",
    "tensorferry.codecs.memory.cuda_driver": "CudaError",
    "tensorferry.codecs.memory.cuda_vmm": "NoFabric",
    "tensorferry.codecs.messages": "Busy Failed Failure ItemReport Payload Proxy Result Sampling TokenLogprob",
    "tensorferry.codecs.pool.export": "Attachment Export",
    "tensorferry.codecs.pool.elastic.mail": "Letter",
    "tensorferry.codecs.pool.pool": "Pool",
    "tensorferry.codecs.pool.publisher": "Publisher",
    "tensorferry.codecs.pool.reader": "Reader",
    "tensorferry.codecs.tensors": "DTYPES View",
    "tensorferry.pipeline.client.client": "Client",
    "tensorferry.pipeline.client.answer_stream": "AnswerStream Outcome",
    "tensorferry.pipeline.deployment.load": "load",
    "tensorferry.pipeline.deployment.spec": "Deployment LimitsSpec ModelSpec SchedulerSpec",
    "tensorferry.pipeline.client.prompt_parts": "Embeddings Image Part Video",
    "tensorferry.pipeline.client.patience": "submit_patiently",
    "tensorferry.stages.adapters.base": "Finish ItemInfo Load ModelAdapter Out split",
    "tensorferry.stages.adapters.fingerprint": "fingerprint_of",
    "tensorferry.stages.engines.base": (
        "Capacity Delta Engine EngineDied EngineItem EngineRequest EngineResult StreamingEngine"
    ),
    "tensorferry.stages.processors.base": "AnimatedFile BadMedia Clip Plan Processor VideoProcessor",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DTYPES",
    "AnimatedFile",
    "AnswerFailed",
    "AnswerStream",
    "AttachRefused",
    "Attachment",
    "BadItem",
    "BadMedia",
    "BadRequest",
    "BadTensor",
    "Busy",
    "Capacity",
    "Client",
    "Clip",
    "ConfigError",
    "CudaError",
    "Delta",
    "Deployment",
    "DeploymentError",
    "Embeddings",
    "Engine",
    "EngineDied",
    "EngineItem",
    "EngineRequest",
    "EngineResult",
    "Export",
    "Failed",
    "Failure",
    "FerryError",
    "Finish",
    "Image",
    "ItemInfo",
    "ItemReport",
    "LeaseNotReady",
    "LeasePoisoned",
    "Letter",
    "LimitsSpec",
    "Load",
    "ModelAdapter",
    "ModelSpec",
    "NoFabric",
    "NotStaged",
    "Out",
    "Outcome",
    "Part",
    "Payload",
    "PeerGone",
    "Plan",
    "Pool",
    "PoolClosed",
    "PoolFull",
    "Processor",
    "Proxy",
    "Publisher",
    "Reader",
    "Result",
    "Sampling",
    "SchedulerSpec",
    "StaleLease",
    "StreamCapturing",
    "StreamDiverged",
    "StreamingEngine",
    "TokenLogprob",
    "UnsupportedDtype",
    "Video",
    "VideoProcessor",
    "View",
    "__version__",
    "fingerprint_of",
    "load",
    "open_inline",
    "split",
    "submit_patiently",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorferry' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
