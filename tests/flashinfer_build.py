"""Compiles our FlashInfer variant with the FlashInfer that is installed or lies in a folder.

No GPU and no driver: FlashInfer writes its sources and its ninja file in a process of its own, nvcc
compiles, ``ptxas -v`` tells the registers and spills of each kernel. Used by the compile tests and
by scripts/flashinfer-versions.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_guard.kernels.flashinfer_variant import Variant

#: Names a folder made by ``pip install --no-deps --target``; see ``folder``.
FOLDER = "HICACHE_GUARD_FLASHINFER"

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_OBJECTS = re.compile(r"^build (\S*_kernel\S*\.o): ", re.MULTILINE)
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ``ptxas`` says of one kernel."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of one compilation; ``error`` is empty where it succeeded."""

    version: str
    kernels: list[Kernel]
    cpu_seconds: float
    error: str = ""


def folder() -> Path | None:
    """The folder that holds FlashInfer, None where it is importable without one."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else None


def cuda_home() -> Path | None:
    """The CUDA toolkit that has nvcc."""
    found = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += [str(Path(found).resolve().parent.parent)] if found else []
    return next((Path(home) for home in homes if home and (Path(home) / "bin/nvcc").exists()), None)


def missing(place: Path | None) -> str:
    """Why nothing can be compiled here; empty where it can."""
    if place is None and importlib.util.find_spec("flashinfer") is None:
        return f"no FlashInfer: install flashinfer-python, or name its folder in {FOLDER}"
    if place is not None and not (place / "flashinfer").is_dir():
        return f"no FlashInfer in {place}, which {FOLDER} names"
    if cuda_home() is None:
        return "no nvcc: set CUDA_HOME to a CUDA toolkit"
    if shutil.which("c++") is None or _ninja(place) is None:
        return "no C++ compiler, or no ninja"
    return ""


def compile_variant(
    variant: Variant, place: Path | None, work: Path, *, library: bool = False
) -> Compiled:
    """Compile ``variant`` for sm_90a under ``work``: its kernels, or the whole ``library``."""
    work.mkdir(parents=True, exist_ok=True)
    generated = _run([sys.executable, "-P", __file__, _dumped(variant)], _environment(place, work))
    if generated.returncode:
        return Compiled("?", [], 0.0, generated.stderr.strip()[-2000:])
    found = json.loads(generated.stdout.splitlines()[-1])
    ninja = _ninja(place)
    assert ninja is not None, "see missing()"
    # Only these hold what runs; the others instantiate the same kernels again, to ask their sizes.
    objects = _OBJECTS.findall(Path(found["ninja"]).read_text())
    command = [ninja, "-j1", "-f", found["ninja"], *([] if library else objects)]
    before = _cpu_seconds()
    built = _run(command, dict(os.environ), Path(found["ninja"]).parent)
    spent = _cpu_seconds() - before
    if built.returncode:
        return Compiled(found["version"], [], spent, (built.stdout + built.stderr)[-2000:])
    return Compiled(found["version"], kernels_in(built.stdout), spent)


def kernels_in(log: str) -> list[Kernel]:
    """The attention kernels that ``ptxas -v`` tells of in ``log``."""
    kernels: dict[str, Kernel] = {}
    name, stack, stores, loads = "", 0, 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spills := _SPILLS.search(line):
            stack, stores, loads = (int(number) for number in spills.groups())
        elif (used := _REGISTERS.search(line)) and "HicacheGuardWindow" in name:
            kernels[name] = Kernel(name, int(used[1]), stack, stores, loads)
    return list(kernels.values())


def _environment(place: Path | None, work: Path) -> dict[str, str]:
    stub = work / "stub"
    if not (stub / "libcuda.so").exists():
        # FlashInfer links against the driver's library, of which it uses no symbol here.
        stub.mkdir(parents=True, exist_ok=True)
        source = stub / "empty.c"
        source.write_text("")
        subprocess.run(
            ["c++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(stub / "libcuda.so")],
            check=True,
        )
    environment = {
        **os.environ,
        "CUDA_HOME": str(cuda_home()),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_EXTRA_CUDAFLAGS": "-Xptxas=-v",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub}",
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "MAX_JOBS": "1",
    }
    if place is not None:
        environment["PYTHONPATH"] = str(place)
    return environment


def _ninja(place: Path | None) -> str | None:
    inside = place / "bin" / "ninja" if place is not None else None
    return str(inside) if inside is not None and inside.exists() else shutil.which("ninja")


def _run(
    command: list[str], environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, cwd=cwd, check=False, text=True, capture_output=True
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _dumped(variant: Variant) -> str:
    fields: dict[str, Any] = asdict(variant)
    dtypes = {key: value for key, value in fields.items() if isinstance(value, torch.dtype)}
    names = {key: str(value).removeprefix("torch.") for key, value in dtypes.items()}
    return json.dumps({**fields, **names})


def _generate(dumped: str) -> None:
    """In the process of its own: write sources and ninja file, and say where they are."""
    flashinfer = importlib.import_module("flashinfer")
    fields = json.loads(dumped)
    fields |= {key: getattr(torch, fields[key]) for key in ("dtype_q", "dtype_kv", "dtype_o")}
    spec = Variant(**fields).spec()
    spec.write_ninja()
    print(json.dumps({"version": flashinfer.__version__, "ninja": str(spec.ninja_path)}))


if __name__ == "__main__":
    _generate(sys.argv[1])
