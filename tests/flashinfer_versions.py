"""The table of docs/flashinfer-versions.md: one text, compiled with each FlashInfer that is pinned.

Told the folder that holds a folder per FlashInfer version and the one that holds SGLang's releases
(see scripts/flashinfer-versions), it compiles the decode kernels with one version after the other,
in one job, and prints Markdown. Of ``--full`` versions the decode library is compiled and linked as
a whole, and the FA2 prefill kernels as well, which takes minutes each.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from flashinfer_build import Compiled, compile_variant

from hicache_guard.kernels.flashinfer_variant import Variant

_PIN = re.compile(r"^Requires-Dist: flashinfer[-_]python(?:\[\w+\])?==(\S+)", re.MULTILINE)


def variant(*, tensor_cores: bool) -> Variant:
    """What is compiled: gpt-oss's window layers."""
    half = torch.bfloat16
    return Variant(tensor_cores, half, half, half, 64, 64, sinks=True)


def pins(releases: Path) -> dict[str, list[str]]:
    """SGLang's releases by the FlashInfer that each pins, from their metadata."""
    found: dict[str, list[str]] = {}
    for metadata in sorted(releases.glob("*/sglang-*.dist-info/METADATA")):
        pinned = _PIN.search(metadata.read_text())
        if pinned:
            found.setdefault(pinned[1], []).append(metadata.parent.parent.name)
    return found


def row(kind: str, compiled: Compiled, version: str, releases: Iterable[str]) -> str:
    """One line of the table."""
    cells = [version, ", ".join(releases) or "none", kind]
    if compiled.error:
        cells += ["no", "", "", "", ""]
    else:
        registers = [kernel.registers for kernel in compiled.kernels]
        spilled = sum(kernel.spill_stores + kernel.spill_loads for kernel in compiled.kernels)
        cells += ["yes", str(len(registers)), f"{min(registers)} to {max(registers)}"]
        cells += [str(spilled), f"{compiled.cpu_seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table to stdout and each compiler's complaint to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("versions", type=Path, help="holds a --target folder per version")
    parser.add_argument("releases", type=Path, help="holds SGLang's releases")
    parser.add_argument("--full", nargs="*", default=[], help="versions to compile more of")
    asked = parser.parse_args()
    pinned = pins(asked.releases)
    print("| FlashInfer | pinned by SGLang | kernels | compiles | instances | registers", end="")
    print(" | spilled bytes | CPU seconds |\n|---|---|---|---|---|---|---|---|", flush=True)
    versions = [place for place in asked.versions.iterdir() if (place / "flashinfer").is_dir()]
    for place in sorted(versions, key=lambda place: _order(place.name)):
        full = place.name in asked.full
        kinds = [("decode library" if full else "decode", False)]
        kinds += [("FA2 prefill", True)] if full else []
        for kind, tensor_cores in kinds:
            with tempfile.TemporaryDirectory() as work:
                form = variant(tensor_cores=tensor_cores)
                made = compile_variant(form, place, Path(work), library=full and not tensor_cores)
            print(row(kind, made, place.name, pinned.get(place.name, [])), flush=True)
            if made.error:
                print(f"{place.name}, {kind}:\n{made.error}", file=sys.stderr)


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
