"""The fake that the gate tests with has what vLLM has, and the connector answers to it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "fake_vllm" / "vllm" / "distributed" / "ec_transfer" / "ec_connector"
PROGRAM = """
import inspect, json
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from tensorferry.vllm_ec import TensorferryConnector
members = {n: list(inspect.signature(m).parameters) for n, m in vars(ECConnectorBase).items() if inspect.isfunction(m)}
assert not inspect.isabstract(TensorferryConnector)
for name, parameters in members.items():
    ours = inspect.signature(getattr(TensorferryConnector, name))
    ours.bind(*[0] * len([p for p in parameters if p != "kwargs"]))
print(json.dumps([members, [role.name for role in ECConnectorRole]]))
"""


@pytest.mark.processes
@pytest.mark.leaves("the fake's module is loaded under a name of its own")
def test_the_fake_has_the_names_and_parameters_of_vllm() -> None:
    import json

    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    theirs, roles = json.loads(ran.stdout.splitlines()[-1])
    spec = spec_from_file_location("fake_base", FAKE / "base.py")
    assert spec is not None
    assert spec.loader is not None
    fake = module_from_spec(spec)
    spec.loader.exec_module(fake)
    assert [role.name for role in fake.ECConnectorRole] == roles
    for name, member in vars(fake.ECConnectorBase).items():
        if inspect.isfunction(member) and name != "__init__":
            assert list(inspect.signature(member).parameters) == theirs[name], name
