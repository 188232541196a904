"""Compiles the Triton kernels for GPUs that need not be there; prints one JSON line for each.

As a program, in a process of its own because Triton must not interpret. A line names the kernel,
its specialisation and architecture, and what ``cuobjdump`` says of the cubin: registers a thread,
bytes of stack and of local memory, which is where what spills goes.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from hicache_guard.kernels import stream_triton, translate_triton, window_triton

#: The books, as ``DeviceBooks`` has them.
BOOKS = {
    "mapping": "*i64",
    **dict.fromkeys(("stamps", "owners", "full_borns", "window_borns"), "*i32"),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Build:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int


def _translation(slots: str, table: str, columns: str, page: int, *ones: str) -> Build:
    """``slots``, ``table`` and ``columns`` are i32 or i64; ``ones`` are sizes of 1.

    Triton compiles a number that is 1 in.
    """
    kernel = translate_triton.translate_kernel
    types = {
        "table": f"*{table}", "rows": f"*{columns}", "lengths": f"*{columns}",
        "queries": f"*{columns}", **BOOKS, "indptr": "*i32", "starts": "*i32",
        "slots": f"*{slots}", "expected": "*i32", "record": "*i64", "scratch": "*i64",
    }  # fmt: skip
    constants = {
        "PAGE": page,
        "BLOCK": translate_triton.BLOCK,
        "BLOCK_REQUESTS": translate_triton.BLOCK_REQUESTS,
        **dict.fromkeys(ones, 1),
    }
    name = f"translate slots={slots} table={table} columns={columns} page={page}"
    name += "".join(f" {one}=1" for one in ones)
    return Build(name, kernel, types, constants, warps=4)


def _stream(slots: str, starts: str, out: str, page: int, *ones: str) -> Build:
    """As ``_translation``, of a stream that was gathered."""
    types = {
        "stream": f"*{slots}", "indptr": "*i32", "starts": f"*{starts}", **BOOKS,
        "out": f"*{out}", "report": "*i64", "scratch": "*i64",
    }  # fmt: skip
    constants = {
        "PAGE": page,
        "BLOCK": translate_triton.BLOCK,
        "BLOCK_REQUESTS": stream_triton.BLOCK_REQUESTS,
        **dict.fromkeys(ones, 1),
    }
    name = f"stream slots={slots} starts={starts} out={out} page={page}"
    name += "".join(f" {one}=1" for one in ones)
    return Build(name, stream_triton.stream_kernel, types, constants, warps=4)


def _attention(
    dtype: torch.dtype, dims: tuple[int, int], group: int, queries: int, *, extras: bool = True
) -> Build:
    """``extras``: sinks and a soft cap."""
    kernel = window_triton.window_kernel
    number = SHORT[dtype]
    types = {
        **dict.fromkeys(("q", "k_buffer", "v_buffer", "out"), f"*{number}"),
        **dict.fromkeys(("indptr", "starts", "expected", "borns", "q_indptr"), "*i32"),
        **dict.fromkeys(("slots", "lengths", "record"), "*i64"),
        "sinks": "*fp32", "lse": "*fp32", "scale": "fp32", "soft_cap": "fp32",
    }  # fmt: skip
    tile = window_triton.tile_of(dtype, group, queries, max(dims))
    warps = tile.pop("num_warps")
    most = 1 << (dims[0].bit_length() - 1)
    constants = {
        "HEADS": group * 8, "GROUP": group, "PAGE": 64, "D": most, "D_REST": dims[0] - most,
        "DV": dims[1], "DV_TILE": 1 << (dims[1] - 1).bit_length(),
        "SINKS": extras, "CAP": extras, "WIDEN": False, **tile,
    }  # fmt: skip
    kind = "decode" if queries == 1 else "prefill"
    name = f"{kind} {number} D={dims[0]}/{dims[1]} group={group} extras={extras}"
    return Build(name, kernel, types, constants, warps)


def builds(everything: bool) -> Iterator[Build]:
    """What is used most, or all that is told apart."""
    sizes = ("table_rows", "table_places", "stride", "full_rows", "window_slots", "room", "window")
    yield _translation("i32", "i32", "i64", 1, *sizes)
    # A stream's own sizes are never compiled in; those of the books are.
    yield _stream("i64", "i64", "i64", 1, "full_rows", "window_slots")
    if not everything:
        yield _stream("i64", "i64", "i64", 1)
        yield _stream("i32", "i32", "i32", 64)
        yield _translation("i32", "i32", "i64", 1)
        yield _translation("i64", "i32", "i64", 64)
        for dims in ((64, 64), (192, 128)):
            for queries in (1, 64):
                yield _attention(torch.bfloat16, dims, 8, queries)
        return
    shapes = ((64, 64), (128, 128), (192, 128), (256, 256))
    for dtype, shape, group, queries in itertools.product(SHORT, shapes, (1, 8), (1, 64)):
        # Single precision spills some bytes from 256 on; no server keeps such KV.
        if dtype is not torch.float32 or shape[0] < 256:
            yield _attention(dtype, shape, group, queries)
    for queries in (1, 64):
        yield _attention(torch.bfloat16, (128, 128), 16, queries, extras=False)
    for slots, table, page in itertools.product(("i32", "i64"), ("i32", "i64"), (1, 3, 64)):
        yield _translation(slots, table, table, page)
    widths = ("i32", "i64")
    for slots, starts, out, page in itertools.product(widths, widths, widths, (1, 3, 64)):
        yield _stream(slots, starts, out, page)


def compiled(build: Build, capability: int) -> dict[str, Any]:
    """Compile for ``sm_<capability>``; what the cubin needs."""
    # Row strides and pointers are multiples of 16 in a server, and so specialised by Triton.
    signature, aligned = {}, {}
    for place, name in enumerate(build.kernel.arg_names):
        kind = "constexpr" if name in build.constants else build.types.get(name, "i32")
        signature[name] = kind
        strides = kind == "i32" and name.endswith(("_row", "_head", "stride"))
        if kind.startswith("*") or strides:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(build.kernel, signature, dict(build.constants), aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": build.warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {what: int(count) for what, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {
        "kernel": build.name, "sm": capability, "registers": used["REG"], "stack": used["STACK"],
        "local": used["LOCAL"], "shared": made.metadata.shared, "cubin": len(made.asm["cubin"]),
    }  # fmt: skip


def main() -> None:
    for build in builds("--all" in sys.argv):
        for capability in (80, 90, 100):
            print(json.dumps(compiled(build, capability)), flush=True)


if __name__ == "__main__":
    main()
