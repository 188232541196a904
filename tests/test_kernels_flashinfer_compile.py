"""The FlashInfer variant compiles for sm_90a without a GPU; decode keeps all of it in registers.

With the FlashInfer that is installed, or that lies in the folder HICACHE_GUARD_FLASHINFER names
(made by ``pip install --no-deps --target``, see scripts/flashinfer-versions). Decode costs some 15
seconds of a core; the prefill kernels minutes, so they are marked slow.
"""

from __future__ import annotations

from pathlib import Path

import flashinfer_build as build
import pytest
import torch

from hicache_guard.kernels.flashinfer_variant import TENSORS, Variant

NEEDS = pytest.mark.skipif(
    bool(build.missing(build.folder())), reason=build.missing(build.folder())
)

LOG = """
ptxas info    : Compiling entry function '_Z18HicacheGuardWindowA' for 'sm_90a'
ptxas info    : Function properties for _Z18HicacheGuardWindowA
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 71 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z11MergeStates' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def gpt_oss(*, tensor_cores: bool) -> Variant:
    half = torch.bfloat16
    return Variant(tensor_cores, half, half, half, 64, 64, sinks=True)


def mimo() -> Variant:
    half = torch.bfloat16
    return Variant(True, half, half, half, 192, 128, sinks=True)


def test_reads_registers_and_spills_of_our_kernels_only() -> None:
    assert build.kernels_in(LOG) == [build.Kernel("_Z18HicacheGuardWindowA", 71, 16, 8, 4)]


def test_another_text_or_form_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.float16
    forms = [
        Variant(cores, half, half, half, 64, 64, sinks, cap)
        for cores in (False, True)
        for sinks in (False, True)
        for cap in (False, True)
    ]
    before = [form.uri for form in forms]
    assert len(set(before)) == len(forms)
    assert before == [form.uri for form in forms]
    monkeypatch.setattr("hicache_guard.kernels.flashinfer_variant.TEXT", "another")
    assert not set(before) & {form.uri for form in forms}


def test_jit_arguments_are_those_that_flashinfers_wrappers_take_by_place() -> None:
    arguments = gpt_oss(tensor_cores=False).jit_args()
    # The wrappers read the name and the names of additional tensors out of the list themselves.
    assert arguments[0] == gpt_oss(tensor_cores=False).uri
    assert arguments[7] == [*TENSORS, "window_sinks"]
    assert len(arguments) == 13
    assert "@" not in arguments[12]


#: FlashInfer's FA2 prefill kernels spill in their largest tiles whatever the variant does: with the
#: check taken out of ours, up to 664 bytes a kernel and 2,424 over the 18 paged causal ones (64
#: dimensions, sinks, 0.7.2.post1); with it up to 912 and 2,992. Of all kernels the worst had 1,092.
PREFILL_SPILLS = 1280


@NEEDS
def test_decode_compiles_without_spills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spilled = most_spilled(gpt_oss(tensor_cores=False), tmp_path, capsys)
    assert spilled == 0


@NEEDS
@pytest.mark.slow
@pytest.mark.parametrize("form", [gpt_oss(tensor_cores=True), mimo()], ids=["64", "192 and 128"])
def test_prefill_compiles(
    form: Variant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spilled = most_spilled(form, tmp_path, capsys)
    if form.head_dim_qk == 64:
        assert spilled <= PREFILL_SPILLS


def most_spilled(form: Variant, work: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Compiles ``form`` and prints its kernels; returns the most bytes that one of them spills."""
    made = build.compile_variant(form, build.folder(), work)
    assert made.error == ""
    with capsys.disabled():
        print(f"\nFlashInfer {made.version}, {form.uri}: {made.cpu_seconds:.0f} CPU seconds")
        for kernel in made.kernels:
            told = f"{kernel.registers} registers, {kernel.stack} bytes of stack"
            print(f"  {told}, {kernel.spill_stores + kernel.spill_loads} spilled: {kernel.name}")
    return max(kernel.spill_stores + kernel.spill_loads for kernel in made.kernels)
