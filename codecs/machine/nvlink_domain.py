"""Whether a GPU belongs to a multi-node NVLink domain (MNNVL). NVML knows; the driver's FABRIC attribute does not."""

from __future__ import annotations

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def in_nvlink_domain(name: str, uuid: str) -> bool:
    """Whether the GPU's fabric has come up as part of a cluster of nodes.

    name, uuid: as nvidia-smi -L prints them. Where NVML cannot say, the name decides: GB200 and GB300 are built for
    it. Source: NCCL, src/mnnvl.cc: state completed and a cluster UUID that is not zero (an H200 behind NVSwitches
    completes with a zero one).
    """
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        try:
            fabric = nvml.device_get_gpu_fabric_info_v(nvml.device_get_handle_by_uuid(uuid))
            return int(fabric.state) == _COMPLETED and any(fabric.cluster_uuid)
        finally:
            nvml.shutdown()
    except Exception:  # no library, no such function, not supported: each version has its own classes for these
        return any(part in name for part in ("GB200", "GB300"))
