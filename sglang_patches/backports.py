"""Our own corrections of known faults, in the order in which they are applied."""

from __future__ import annotations

from hicache_guard.patches.anchors import Find
from hicache_guard.patches.edits import Insert
from hicache_guard.patches.patch import Patch, Target

_SINCE_12_POST1 = (
    "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16",
    "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip

#: Forgets the window slots of what was just allocated, without a wait for the device.
_FORGET = "self.full_to_swa_index_mapping.index_fill_(0, alloc_full_indices.to(torch.int64), 0)"

BACKPORTS: tuple[Patch, ...] = (
    Patch(
        name="tail-clears-mapping",
        kind="backport",
        reports=(25805,),
        summary="Forget old window slots when only the tail gets new ones",
        reason=(
            "Full slots that were used before may still point at another request's window slots.\n"
            "An allocation that gives window slots only to the tail left the rest pointing there;\n"
            "freeing them released a live request's window pages."
        ),
        targets=(
            Target(
                "SWATokenToKVPoolAllocator.alloc_extend_swa_tail",
                (
                    Insert(
                        _FORGET,
                        "before",
                        Find("assign", target="self.full_to_swa_index_mapping[__]"),
                    ),
                ),
            ),
        ),
        affects=("0.5.12",),
        clear=_SINCE_12_POST1,
    ),
    Patch(
        name="tail-of-zero",
        kind="backport",
        reports=(26078,),
        summary="Forget old window slots when the tail is empty",
        reason=(
            "An allocation without any window slot returned before the old entries of its full\n"
            "slots were cleared; they kept pointing at window slots of another request."
        ),
        targets=(
            Target(
                "SWATokenToKVPoolAllocator.alloc_extend_swa_tail",
                (
                    Insert(
                        _FORGET,
                        "before",
                        Find("return", inside=Find("if", test="swa_tail_len == 0")),
                    ),
                ),
            ),
        ),
        affects=("0.5.12", *_SINCE_12_POST1),
    ),
    Patch(
        name="translation-memo-register",
        kind="backport",
        reports=(25889,),
        summary="Drop remembered window slots when the mapping is replaced",
        reason=(
            "A translation remembered under the old mapping was used under the new one: writes\n"
            "went to wrong slots, or outside the pool where the new one is smaller."
        ),
        targets=(
            Target(
                "DeepSeekV4TokenToKVPool.register_mapping",
                (Insert("self.cached_loc = None", "end"),),
            ),
        ),
        needs=("DeepSeekV4TokenToKVPool.set_swa_key_buffer_radix_fused",),
        affects=("0.5.12",),
        clear=_SINCE_12_POST1,
    ),
)
