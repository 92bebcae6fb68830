"""What the probe finds out, by trying, of this machine and of stub drivers with every fault there is (B14-B17)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tensorferry.codecs.machine import probe
from tensorferry.codecs.machine.facts import UNTRIED, Trial
from tensorferry.codecs.machine.visible_devices import BadVisibleDevices, visible_devices
from tensorferry.codecs.memory import fork_guard
from tensorferry.codecs.memory.cuda_driver import STICKY, CudaError, Driver, NoDriver

DENIED = "CUDA_ERROR_NOT_PERMITTED"

# --- CUDA_VISIBLE_DEVICES (B15)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, None),
        ("", ()),
        ("  ", ()),
        ("-1", ()),
        ("0", ("0",)),
        (" 0, 1 ", ("0", "1")),
        ("1,0", ("1", "0")),
        ("007", ("7",)),
        ("0,2,-1,1", ("0", "2")),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",)),
        ("GPU-8932f937,GPU-0a", ("GPU-8932f937", "GPU-0a")),
        ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f",)),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0",)),
    ],
)
def test_b15_visible_devices_that_are_read(value: str | None, devices: tuple[str, ...] | None) -> None:
    assert visible_devices(value) == devices


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0,0", "names 0 twice"),
        ("0,00", "names 0 twice"),
        ("GPU-8932f937,gpu-8932f937", "names 'gpu-8932f937'"),
        ("GPU-AB,GPU-ab", "names GPU-ab twice"),
        ("0,GPU-8932f937", "mixes indices and UUIDs"),
        ("all", "names 'all'"),
        ("0-2", "names '0-2'"),
        ("0,,1", "names ''"),
        ("0;1", "names '0;1'"),
        ("GPU-", "names 'GPU-'"),
        ("\u0661", "names '\\u0661'"),
        ("1e9", "names '1e9'"),
        ("9" * 400, "names '999"),
    ],
)
def test_b15_visible_devices_that_are_refused_name_the_variable(value: str, problem: str) -> None:
    with pytest.raises(BadVisibleDevices) as caught:
        visible_devices(value)
    assert str(caught.value).startswith("CUDA_VISIBLE_DEVICES='")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 300


# --- the host


def test_this_machine_passes_sealed_memory() -> None:
    facts = probe.host_facts(os.environ)
    assert facts.memfd == Trial(True)
    assert facts.kernel == os.uname().release
    assert facts.available_nbytes > 0
    assert facts.seccomp in (0, 1, 2)


def test_b16_a_memfd_that_cannot_be_made_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        assert probe.memfd_trial() == Trial(False, "create", "Operation not permitted")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refused)
        assert probe.memfd_trial() == Trial(False, "pidfd", "Operation not permitted")
    assert probe.memfd_trial().ok


@pytest.mark.processes
def test_b16_no_descriptor_left_is_a_fact() -> None:
    """For real: a process that may open no more."""
    program = (
        "import os, resource\n"
        "from tensorferry.codecs.machine import probe\n"
        "open_now = len(os.listdir('/proc/self/fd')) - 1\n"
        "for spare in range(6):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + spare, 4096))\n"
        "    print(probe.memfd_trial())\n"
        "assert len(os.listdir('/proc/self/fd')) - 1 == open_now\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    said = ran.stdout.splitlines()
    assert said[0].endswith("Too many open files")
    assert {line.partition(":")[0] for line in said} >= {"create", "pass"}


def test_facts_of_another_root(tmp_path: Path) -> None:
    """A container as it might be: WSL2, a filter, no /dev/shm, an IMEX channel, MPS."""
    for path, text in {
        "proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2\n",
        "proc/self/status": "Name:\tx\nSeccomp:\t2\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n",
        probe.IMEX_CHANNEL: "",
        f"{probe.MPS_PIPE}/control": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532447]")
    environ = {"CUDA_VISIBLE_DEVICES": "0,0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "EAGER"}
    facts = probe.host_facts(environ, tmp_path)
    assert (facts.wsl, facts.seccomp, facts.shm_nbytes, facts.available_nbytes) == (True, 2, None, 8192)
    assert (facts.imex, facts.mps, facts.nested_pids) == (True, True, True)
    assert (facts.visible, facts.max_connections, facts.module_loading) == (None, "1", "EAGER")
    assert "names 0 twice" in facts.visible_problem
    elsewhere = probe.host_facts({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}, tmp_path)
    assert not elsewhere.mps


# --- CUDA, by a stub driver


@pytest.mark.processes
def test_a_machine_that_can_do_everything(stub_cuda) -> None:
    found = probe.cuda_facts(stub_cuda.environ)
    assert (found.problem, found.driver, len(found.gpus)) == ("", 13000, 2)
    assert [found.words, found.ipc, found.peer, found.posix_fd, found.fabric] == [Trial(True)] * 5
    assert found.gpus[0].uuid == "GPU-01010101-0101-0101-0101-010101010101"
    assert (found.gpus[0].peers, found.gpus[1].peers) == ((1,), (0,))
    assert not found.gpus[0].mnnvl
    assert all_given_back(stub_cuda)


@pytest.mark.processes
@pytest.mark.parametrize("nvml", ["", "missing"])
def test_an_nvlink_domain_is_known_by_nvml_and_else_by_name(stub_cuda, nvml: str) -> None:
    stub_cuda.plan(gpus=[{"name": "NVIDIA GB200", "mnnvl": True}, {"name": "NVIDIA H200"}], nvml=nvml)
    assert [gpu.mnnvl for gpu in probe.cuda_facts(stub_cuda.environ).gpus] == [True, False]


@pytest.mark.processes
def test_a_mig_instance_is_named_as_one(stub_cuda) -> None:
    stub_cuda.plan(gpus=[{"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}])
    (gpu,) = probe.cuda_facts(stub_cuda.environ).gpus
    assert gpu.mig
    assert gpu.uuid.startswith("MIG-0101")


#: call that fails -> the trial it spoils, and the step that trial names
FAULTS = {
    "cuMemHostRegister": ("words", "register"),
    "cuMemHostGetDevicePointer": ("words", "register"),
    "cuStreamCreate": ("words", "write"),
    "cuStreamWriteValue32": ("words", "write"),
    "cuStreamWaitValue32": ("words", "write"),
    "cuStreamSynchronize": ("words", "write"),
    "cuMemAlloc": ("ipc", "allocate"),
    "cuIpcGetMemHandle": ("ipc", "export"),
    "cuIpcOpenMemHandle": ("ipc", "import"),
    "cuMemGetAllocationGranularity posix_fd": ("posix_fd", "create"),
    "cuMemGetAllocationGranularity fabric": ("fabric", "create"),
    "cuMemCreate posix_fd": ("posix_fd", "create"),
    "cuMemCreate fabric": ("fabric", "create"),
    "cuMemExportToShareableHandle posix_fd": ("posix_fd", "export"),
    "cuMemExportToShareableHandle fabric": ("fabric", "export"),
    "cuMemImportFromShareableHandle posix_fd": ("posix_fd", "import"),
    "cuMemImportFromShareableHandle fabric": ("fabric", "import"),
    "cuMemAddressReserve": ("posix_fd", "map"),
    "cuMemMap": ("posix_fd", "map"),
    "cuMemSetAccess": ("posix_fd", "map"),
}


@pytest.mark.processes
@pytest.mark.parametrize("call", FAULTS)
def test_b17_flags_say_yes_and_a_step_says_no(stub_cuda, call: str) -> None:
    """The trial names step, call and CUresult; the others are not spoilt, and everything taken is given back."""
    trial, step = FAULTS[call]
    stub_cuda.plan(fail={call: DENIED})
    found = probe.cuda_facts(stub_cuda.environ)
    assert found.gpus[0].fabric, "the flag still says yes"
    assert getattr(found, trial) == Trial(False, step, f"{call.split()[0]}: {DENIED}")
    others = {"words", "ipc", "posix_fd", "fabric"} - {trial}
    shared = {"fabric"} if " " not in call and trial == "posix_fd" else set()  # both kinds of chunk need that call
    assert {other for other in others if not getattr(found, other).ok} == shared
    assert all_given_back(stub_cuda)


@pytest.mark.processes
def test_b17_memory_that_opens_and_reads_wrong_is_no_memory(stub_cuda) -> None:
    stub_cuda.plan(garble=True)
    found = probe.cuda_facts(stub_cuda.environ)
    wrong = Trial(False, "read", "65536 of 65536 bytes are not what was written")
    assert [found.ipc, found.posix_fd, found.fabric] == [wrong] * 3
    assert found.words.ok


@pytest.mark.processes
def test_b17_words_that_never_arrive(stub_cuda) -> None:
    stub_cuda.plan(deaf=True)
    assert probe.cuda_facts(stub_cuda.environ).words == Trial(
        False, "look", "the CPU sees 0x0 where the stream wrote 0x600d"
    )


@pytest.mark.processes
def test_no_context_is_to_be_had(stub_cuda) -> None:
    stub_cuda.plan(fail={"cuDevicePrimaryCtxRetain": "CUDA_ERROR_OUT_OF_MEMORY"})
    found = probe.cuda_facts(stub_cuda.environ)
    assert found.ipc == Trial(False, "context", "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY")
    assert (found.words, found.posix_fd, found.fabric, found.peer) == (found.ipc, found.ipc, found.ipc, None)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "problem", "missing"),
    [
        ({"missing": True}, "libcuda.so.1 cannot be loaded", True),
        ({"fail": {"cuInit": "CUDA_ERROR_NO_DEVICE"}}, "cuInit: CUDA_ERROR_NO_DEVICE", True),
        ({"fail": {"cuInit": "CUDA_ERROR_SYSTEM_NOT_READY"}}, "cuInit: CUDA_ERROR_SYSTEM_NOT_READY", False),
        ({"fail": {"cuDeviceGetCount": "CUDA_ERROR_UNKNOWN"}}, "cuDeviceGetCount: CUDA_ERROR_UNKNOWN", False),
        ({"crash": ["cuInit"]}, "the probe was killed by SIGSEGV", False),
        ({"crash": ["cuMemAlloc"]}, "the probe was killed by SIGSEGV", False),
    ],
)
def test_a_driver_that_does_not_come_up(stub_cuda, plan: dict, problem: str, missing: bool) -> None:
    stub_cuda.plan(**plan)
    found = probe.cuda_facts(stub_cuda.environ)
    assert (found.problem, found.missing, found.gpus, found.ipc) == (problem, missing, (), UNTRIED)


@pytest.mark.processes
def test_a_driver_without_devices(stub_cuda) -> None:
    stub_cuda.plan(gpus=[])
    found = probe.cuda_facts(stub_cuda.environ)
    assert (found.problem, found.driver, found.gpus, found.ipc) == ("", 13000, (), UNTRIED)


@pytest.mark.processes
def test_a_second_process_that_crashes_costs_its_trials_alone(stub_cuda) -> None:
    stub_cuda.plan(crash=["cuIpcOpenMemHandle"])
    found = probe.cuda_facts(stub_cuda.environ)
    assert found.words.ok
    assert found.ipc == Trial(False, "import", "the second process ended with status -11")
    assert not found.posix_fd.ok


@pytest.mark.processes
@pytest.mark.parametrize("call", ["cuInit", "cuStreamSynchronize", "cuIpcOpenMemHandle"])
def test_a_driver_that_hangs_is_given_up_with_all_its_processes(stub_cuda, call: str, until) -> None:
    stub_cuda.plan(hang=[call])
    found = probe.cuda_facts(stub_cuda.environ, timeout_s=2.0)
    assert found.problem == "the driver did not answer within 2 s"
    pids = {int(line.split()[0]) for line in (stub_cuda.folder / "calls.log").read_text().splitlines()}
    assert pids
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.processes
def test_this_machine_without_a_driver_says_so() -> None:
    found = probe.cuda_facts(os.environ)
    if not found.missing:
        pytest.skip("there is a driver")
    assert "libcuda.so.1" in found.problem or "CUDA_ERROR_NO_DEVICE" in found.problem


@pytest.mark.processes
def test_the_caller_never_loads_cuda(stub_cuda) -> None:
    program = "import os, sys\nfrom tensorferry.codecs.machine import probe\nassert probe.gather(os.environ).has_gpu\n"
    program += "print(*[name for name in sys.modules if name.startswith(('cuda', 'torch', 'asyncio', 'zmq'))])\n"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=stub_cuda.environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "\n"


def all_given_back(stub_cuda) -> bool:
    """What was taken with success was given back, in every process of the probe."""
    done = Counter(call for call, result in stub_cuda.calls() if result == "ok")
    assert done["cuInit"], "the stub was not used"
    for taken, given in {
        ("cuDevicePrimaryCtxRetain",): "cuDevicePrimaryCtxRelease",
        ("cuCtxPushCurrent",): "cuCtxPopCurrent",
        ("cuMemAlloc",): "cuMemFree",
        ("cuIpcOpenMemHandle",): "cuIpcCloseMemHandle",
        ("cuMemCreate", "cuMemImportFromShareableHandle"): "cuMemRelease",
        ("cuMemAddressReserve",): "cuMemAddressFree",
        ("cuMemMap",): "cuMemUnmap",
        ("cuMemHostRegister",): "cuMemHostUnregister",
        ("cuStreamCreate",): "cuStreamDestroy",
    }.items():
        assert sum(done[call] for call in taken) == done[given], (taken, done)
    left = [path.name for path in stub_cuda.folder.iterdir() if path.name.startswith("m")]
    assert not left, left
    return True


# --- the driver module


class Bindings:
    """Bindings with a single call."""

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome

    def cuMemFree(self, pointer: int) -> object:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Result(int):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_failed_call_says_call_and_result() -> None:
    with pytest.raises(CudaError, match=r"^cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS$") as caught:
        Driver(Bindings((Result(700),))).free(1)
    assert caught.value.sticky
    with pytest.raises(CudaError, match=r"^cuMemFree: CUresult 9$") as caught:
        Driver(Bindings((9,))).free(1)
    assert not caught.value.sticky
    with pytest.raises(CudaError, match=r'^cuMemFree: Function "cuMemFree" not found$'):
        Driver(Bindings(RuntimeError('Function "cuMemFree" not found'))).free(1)
    with pytest.raises(CudaError, match=r"^cuNone: not in this cuda-python$"):
        Driver(Bindings(None)).call("cuNone")


def test_values_of_a_call() -> None:
    assert Driver(Bindings((0,))).call("cuMemFree", 1) is None
    assert Driver(Bindings((0, 5))).call("cuMemFree", 1) == 5
    assert Driver(Bindings((0, 5, 6))).call("cuMemFree", 1) == (5, 6)


def test_sticky_results_exist() -> None:
    """Their names, and that nothing harmless is among them."""
    from cuda.bindings import driver

    assert {name for name in STICKY if name not in driver.CUresult.__members__} == set()
    assert "CUDA_ERROR_OUT_OF_MEMORY" not in STICKY
    assert "CUDA_ERROR_NOT_PERMITTED" not in STICKY


@pytest.mark.processes
def test_r8_a_forked_child_closes_what_it_should_not_keep(tmp_path: Path) -> None:
    """With a folder of ours in the place of /dev/nvidia*; loading a driver registers the hook, once."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "other").touch()
    program = (
        "import os, sys\n"
        "from tensorferry.codecs.memory import fork_guard as forked\n"
        f"forked.close_descriptors.__defaults__ = ({str(tmp_path / 'nvidia')!r},)\n"
        "forked.close_in_forked_children()\n"
        "forked.close_in_forked_children()\n"
        f"kept = os.open({str(tmp_path / 'other')!r}, os.O_RDONLY)\n"
        f"nvidia = os.open({str(tmp_path / 'nvidia0')!r}, os.O_RDONLY)\n"
        "if (child := os.fork()) == 0:\n"
        "    found = [os.path.exists(f'/proc/self/fd/{fd}') for fd in (kept, nvidia)]\n"
        "    os._exit(0 if found == [True, False] else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "os.fstat(nvidia)\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert fork_guard.NVIDIA == "/dev/nvidia"


@pytest.mark.processes
def test_r8_loading_a_driver_hooks_forks(stub_cuda) -> None:
    program = (
        "import os\n"
        "from tensorferry.codecs.memory import fork_guard as forked\n"
        "from tensorferry.codecs.memory.cuda_driver import Driver\n"
        "hooks = []\n"
        "os.register_at_fork = lambda after_in_child: hooks.append(after_in_child)\n"
        "Driver.load(); Driver.load()\n"
        "print(hooks.count(forked.close_descriptors))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=stub_cuda.environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "1\n"


def test_a_missing_driver_is_the_same_error_in_another_process() -> None:
    error = NoDriver("libcuda.so.1 cannot be loaded", missing=True)
    again = type(error)(*error.args)
    assert (str(again), again.missing) == ("libcuda.so.1 cannot be loaded", True)


# --- a real GPU


@pytest.mark.gpu
@pytest.mark.processes
def test_the_trials_on_this_gpu() -> None:
    found = probe.cuda_facts(os.environ)
    if found.problem:
        pytest.skip(found.problem)
    assert found.gpus[0].uuid.startswith(("GPU-", "MIG-"))
    assert found.words.ok, found.words
    assert found.ipc.ok or found.posix_fd.ok, (found.ipc, found.posix_fd)
    if not probe.host_facts(os.environ).imex:
        assert not found.fabric.ok, "without an IMEX channel"


@pytest.mark.processes
@pytest.mark.gpu
def test_the_probe_leaves_no_gpu_memory_behind() -> None:
    found = probe.cuda_facts(os.environ)
    if found.problem:
        pytest.skip(found.problem)
    program = (
        "from tensorferry.codecs.memory.cuda_driver import Driver\n"
        "cuda = Driver.load()\n"
        "with cuda.context(0): print(cuda.call('cuMemGetInfo')[0])\n"
    )
    run = [sys.executable, "-c", program]
    before = int(subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout)
    probe.cuda_facts(os.environ)
    after = int(subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert before - after < 16 << 20
