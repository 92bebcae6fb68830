"""Makes torchvision importable beside a torch without CUDA. Run by `make test-vllm` in the environment that it makes.

PyPI's torchvision for torch 2.13 (0.28.0) is built for CUDA 13: its `_C.so` needs libtorch_cuda, is not loaded beside
a torch without CUDA, and `import torchvision` then ends with "operator torchvision::nms does not exist", because it
registers fake kernels for operators that `_C.so` would have declared. vLLM cannot inspect Qwen3-VL without torchvision.
This script looks whether the import works. If not, it leaves two files in site-packages: this module, and a `.pth` file
that installs `DeclareFirst` in every interpreter of the environment. Nothing of vLLM's or of ours calls the two
operators. With the torchvision of https://download.pytorch.org/whl/cpu nothing is left there.
"""

from __future__ import annotations

import importlib
import importlib.abc
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

DECLARED: list[object] = []  #: what declares the operators: torch forgets them when it is collected


class DeclareFirst(importlib.abc.MetaPathFinder):
    """Declares the two operators when torchvision is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not DECLARED:  # looked for more often than it is imported
            from torch import library

            operators = library.Library("torchvision", "DEF")
            operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(operators)
        return None


def loads() -> bool:
    """Whether a new interpreter of this environment imports torchvision."""
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, timeout=300).returncode == 0
    )


def main() -> None:
    if loads():
        return
    packages = Path(sysconfig.get_paths()["purelib"])
    name = Path(__file__).stem
    shutil.copyfile(__file__, packages / f"{name}.py")
    (packages / f"{name}.pth").write_text(f"import {name}; {name}.install()\n", encoding="utf-8")
    if not loads():
        sys.exit("torchvision does not import beside this torch, also with its operators declared")


def install() -> None:
    sys.meta_path.insert(0, DeclareFirst())


if __name__ == "__main__":
    main()
