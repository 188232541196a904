"""Our own corrections of known faults, in the order in which they are applied.

Where two patches write at the start of the same method, the later one here comes first there.
Faults that cannot be told from rightful calls without bookkeeping have no patch:
docs/upstream-issues.md says which, and the guard finds them.
"""

from __future__ import annotations

from hicache_guard.patches.anchors import Find
from hicache_guard.patches.edits import Insert, Replace
from hicache_guard.patches.patch import Patch, Target

_RELEASES = (
    "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1",
    "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip


def _span(first: str, last: str) -> tuple[str, ...]:
    return _RELEASES[_RELEASES.index(first) : _RELEASES.index(last) + 1]


def _without(*some: str) -> tuple[str, ...]:
    return tuple(version for version in _RELEASES if version not in some)


_ALLOCATOR = "SWATokenToKVPoolAllocator"

#: Forgets the window slots of what was just allocated, without a wait for the device.
_FORGET = "self.full_to_swa_index_mapping.index_fill_(0, alloc_full_indices.to(torch.int64), 0)"

#: Names every slot of each page that is freed in part; the release waits for the device here too.
_WHOLE_PAGES = """
if self.page_size > 1:
    pages = torch.unique(free_index // self.page_size)
    within = torch.arange(self.page_size, device=pages.device)
    free_index = (pages[:, None] * self.page_size + within).reshape(-1)
"""

#: Queues window slots instead of full ones, in a fixed shape: a slot without one gives a 0.
_RESOLVE = """
first = free_index.to(torch.int64) // self.page_size * self.page_size
whole = (first[:, None] + torch.arange(self.page_size, device=first.device)).reshape(-1)
free_index = self.full_to_swa_index_mapping[whole]
self.full_to_swa_index_mapping.index_fill_(0, whole, 0)
"""

#: Dropping pages changes the shape, and a device would have to be waited for to learn the new one.
_ONLY_PAGES = """
if swa_pages.is_cpu:
    swa_pages = swa_pages[swa_pages > 0]
elif not _is_npu and swa_pages.is_cuda:
    torch._assert_async((swa_pages > 0).all(), "window free of slots without a window page")
"""

#: Lengths and free lists are known to the host.
_ROOM_ON_BOTH_SIDES = """
new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
if new_pages * self.page_size > min(
    self.full_attn_allocator.available_size(), self.swa_attn_allocator.available_size()
):
    return None
"""

#: A request reads the full slots that the tree is about to free: give it and the tree the window
#: slots of the newcomer instead, and let the newcomer's full slots be what is freed.
_KEEP_WHAT_IS_LOCKED = """
if {lock} > 0:
    start = max(swa_evicted_seqlen - {before}, 0)
    kept, incoming = {owner}.value[start:{end}], {brought}[start:{end}]
    window = {allocator}.full_to_swa_index_mapping[incoming]
    {allocator}.full_to_swa_index_mapping.index_fill_(0, incoming.to(torch.int64), 0)
    {allocator}.set_full_to_swa_mapping(kept, window)
    {owner}.value = torch.cat(({owner}.value[:start], incoming))
    {brought} = torch.cat(({brought}[:start], kept, {brought}[{after}:]))
"""

#: Attention of a layer whose KV lies in the window pool, to what is in the window and where it is.
#: ``{what}`` says whether a token sees no later ones, and how many tokens of each request are new.
_WINDOW_LAYER = """
home = self if hasattr(self, "token_to_kv_pool") else forward_batch
pool, table = home.token_to_kv_pool, home.req_to_token_pool.req_to_token
_, is_window_layer = getattr(pool, "layers_mapping", {{}}).get(layer.layer_id, (0, False))
if is_window_layer and forward_batch.encoder_lens is None:
    rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
    {what}
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    reach, done = layer.sliding_window_size, 0
    if not causal or reach is None or reach < 0:
        reach = max(lengths, default=0)
    for row, length, new in zip(rows, lengths, added):
        first = max(length - new - reach, 0)
        slots = pool.translate_loc_from_full_to_swa(table[row, first:length])
        at = torch.arange(first, length, device=slots.device)
        apart = at[len(at) - new :, None] - at
        ours = slice(done, done + new)
        o_[ours] = scaled_dot_product_attention(
            q_[ours].transpose(0, 1)[None],
            keys[slots].to(q_.dtype).transpose(0, 1)[None],
            values[slots].to(q_.dtype).transpose(0, 1)[None],
            attn_mask=(apart <= reach) & (apart >= (0 if causal else -reach)),
            enable_gqa=use_gqa,
            scale=layer.scaling,
        )[0].transpose(0, 1)
        done += new
    return o
"""

#: How much KV of a turn was computed is on the request, from 0.5.19 on on its KV record. The end of
#: the turn has one token more, unless a verify that computes it was launched meanwhile.
_COMPUTED_ONLY = """
clock = req if hasattr(req, "kv_committed_len") else req.kv
if clock.mamba_pool_idx is None:
    target = min(target, clock.kv_committed_len)
"""

BACKPORTS: tuple[Patch, ...] = (
    Patch(
        name="tail-clears-mapping",
        kind="backport",
        reports=(25805,),
        summary="Forget old window slots when only the tail gets new ones",
        fault=(
            "a recycled full page keeps its old window entries after a tail allocation; "
            "another request's window page is freed"
        ),
        cases=("C1",),
        reason=(
            "Full slots that were used before may still point at another request's window slots.\n"
            "An allocation that gives window slots only to the tail left the rest pointing there;\n"
            "freeing them released a live request's window pages."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}.alloc_extend_swa_tail",
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
        clear=_without("0.5.12"),
    ),
    Patch(
        name="tail-of-zero",
        kind="backport",
        reports=(26078,),
        summary="Forget old window slots when the tail is empty",
        fault="as #25805, with a tail of no tokens: the allocation returns before it clears",
        cases=("C4",),
        reason=(
            "An allocation without any window slot returned before the old entries of its full\n"
            "slots were cleared; they kept pointing at window slots of another request."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}.alloc_extend_swa_tail",
                (
                    Insert(
                        _FORGET,
                        "before",
                        Find("return", inside=Find("if", test="swa_tail_len == 0")),
                    ),
                ),
            ),
        ),
        affects=_RELEASES,
    ),
    Patch(
        name="translation-memo-register",
        kind="backport",
        reports=(25889,),
        summary="Drop remembered window slots when the mapping is replaced",
        fault="a remembered translation outlives the mapping: wrong slots, or out of range",
        cases=("C2", "C2b"),
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
        clear=_without("0.5.12"),
    ),
    Patch(
        name="translation-memo-write",
        kind="backport",
        reports=(25889,),
        summary="Translate slots anew at each window write",
        fault="a remembered translation outlives an entry or a batch: wrong slots",
        cases=("C3", "C3b", "memo_of_the_norm_rope_write"),
        reason=(
            "A translation was remembered from the first layer on. An entry changed in place, or\n"
            "another batch that wrote in between, left later layers writing to wrong slots.\n\n"
            "Cost: with SGLANG_OPT_CACHE_SWA_TRANSLATION, which is off by default, one small\n"
            "gather a layer, as without it."
        ),
        targets=tuple(
            Target(
                f"DeepSeekV4TokenToKVPool.{method}", (Insert("self.cached_loc = None", "start"),)
            )
            for method in (
                "set_swa_key_buffer_radix_fused",
                "set_swa_key_buffer_radix_fused_norm_rope",
            )
        ),
        affects=_span("0.5.12", "0.5.12.post1"),
        clear=_span("0.5.13", "0.5.23"),
    ),
    Patch(
        name="window-slots-register",
        kind="backport",
        reports=(25889,),
        summary="Drop the window slots of a batch when the mapping is replaced",
        fault="the window slots of a batch outlive the mapping: wrong slots",
        cases=("batch_slots_outlive_the_mapping",),
        reason=(
            "The window slots that were set for a batch stayed in use after the mapping that they\n"
            "were read from had been replaced: the next write went to slots of somebody else."
        ),
        targets=(Target("SWAKVPool.register_mapping", (Insert("self.swa_loc = None", "end"),)),),
        needs=("SWAKVPool.set_kv_buffer", "SWAKVPool.set_swa_loc"),
        affects=_span("0.5.12", "0.5.12.post1"),
        clear=_span("0.5.13", "0.5.23"),
    ),
    Patch(
        name="partial-free-clears-page",
        kind="backport",
        reports=(27779,),
        summary="Forget every window slot of a page that is freed in part",
        fault=(
            "a page freed in part keeps the entries of the rest; somebody else's window page "
            "is freed"
        ),
        cases=("partial_free_then_load_back",),
        reason=(
            "A free that names some slots of a page releases the whole page, but only the entries\n"
            "of the named slots were cleared. The others went on pointing at a window page that\n"
            "was given to somebody else, and freeing them later released it."
        ),
        targets=(Target(f"{_ALLOCATOR}.free_swa", (Insert(_WHOLE_PAGES, "start"),)),),
        affects=_span("0.5.12", "0.5.13.post1"),
        clear=_span("0.5.14", "0.5.23"),
    ),
    Patch(
        name="queued-window-free",
        kind="backport",
        reports=(36081, 36135),
        summary="Find the window slots of a queued free when it is queued",
        fault=(
            "a queued window free is looked up when the group ends: wrong pages are freed, "
            "others lost"
        ),
        cases=("S2", "queued_free_of_a_part_repointed"),
        reason=(
            "In an open group a window free kept full slots and looked their entries up when the\n"
            "group ended. An entry changed in between led to a live request's window slots, and\n"
            "the old ones were lost.\n\n"
            "Cost: what is queued is every slot of the pages touched, a page of entries for each\n"
            "slot named. Nothing waits for the device before the group ends."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}.free_swa",
                (Insert(_RESOLVE, "before", Find("call", value="self.swa_free_group.append(__)")),),
            ),
            Target(
                f"{_ALLOCATOR}.free_group_end",
                (
                    Replace(
                        "self.free_swa(torch.cat(swa_free_group))",
                        "self.swa_attn_allocator.free("
                        "(window := torch.cat(swa_free_group))[window > 0])",
                    ),
                ),
            ),
        ),
        affects=("0.5.18",),
        clear=_without("0.5.18"),
    ),
    Patch(
        name="padding-not-freed",
        kind="backport",
        reports=(),
        summary="Keep the padding page and negative slots out of the free lists",
        fault=(
            "a freed 0 or -1 puts the padding page, or one that does not exist, into the free list"
        ),
        cases=("C9", "C10", "padding_alone_is_freed"),
        reason=(
            "A row with a zero-filled end, or with a -1 in it, put the padding page or a page\n"
            "that does not exist into the free list; both were handed out. A -1 also overwrote\n"
            "the end of the mapping, which stands for `no slot`.\n\n"
            "Cost: one small kernel a window free; in the set-shaped free of full pages a second\n"
            "look at the device next to the one that the release takes there. Pools of one-slot\n"
            "pages are as before: their free waits for nothing and cannot drop slots."
        ),
        targets=(
            Target(
                "PagedTokenToKVPoolAllocator.free",
                (
                    Replace(
                        "free_index // self.page_size",
                        "free_index[free_index >= self.page_size] // self.page_size",
                    ),
                ),
            ),
            Target(
                f"{_ALLOCATOR}.free_swa", (Insert("free_index = free_index.clamp(min=0)", "start"),)
            ),
        ),
        affects=_RELEASES,
    ),
    Patch(
        name="segment-free-of-nothing",
        kind="backport",
        reports=(38519,),
        summary="Free no window page for slots that have none",
        fault="a window free by segment of slots without a window page frees the padding page",
        cases=("C6", "C6b", "C7", "C15", "C15b"),
        reason=(
            "A window free by segment took the page of every first slot, also where the entry was\n"
            "empty: the padding page entered the free list and was handed out.\n\n"
            "On a CPU such slots are skipped. On a GPU the number of pages is not known without a\n"
            "wait that these releases do not have: there the call stops the process with a\n"
            "message instead of corrupting KV, for two small kernels a call."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}._free_swa_pages",
                (Insert(_ONLY_PAGES, "before", Find("if", test="self.free_group is not None")),),
            ),
        ),
        affects=_span("0.5.20", "0.5.23"),
        clear=_span("0.5.12", "0.5.19"),
    ),
    Patch(
        name="backup-holds-mapping",
        kind="backport",
        reports=(),
        summary="Back up and restore the mapping with the free lists",
        fault=(
            "a draft taken back leaves its entries; what was freed meanwhile comes back "
            "without them"
        ),
        cases=("C12",),
        reason=(
            "A draft that is taken back returned its pages but left its entries, and what was\n"
            "freed meanwhile came back without them: entries led to window slots of others, and\n"
            "pages were lost.\n\n"
            "Cost: a copy of the mapping, 8 bytes a full slot, at each backup and restore."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}.backup_state",
                (
                    Replace(
                        "[__full, __window]",
                        "[__full, __window, self.full_to_swa_index_mapping.clone()]",
                    ),
                ),
            ),
            Target(
                f"{_ALLOCATOR}.restore_state",
                (
                    Replace("len(state) == 2", "len(state) == 3"),
                    Insert("self.full_to_swa_index_mapping.copy_(state[2])", "end"),
                ),
            ),
        ),
        affects=_span("0.5.12", "0.5.16"),
        clear=_span("0.5.17", "0.5.23"),
    ),
    Patch(
        name="decode-needs-both-sides",
        kind="backport",
        reports=(),
        summary="Give no decode slot unless both sides have a page for it",
        fault=(
            "decode loses a page when only one side has one; up to 0.5.21 it reads past the "
            "free list"
        ),
        cases=("S3", "decode_without_a_window_page", "decode_without_a_full_page"),
        reason=(
            "With a full page and no window page left, a decode step kept the full page and\n"
            "answered that there was no room: the page was lost. Up to 0.5.21 the kernel read\n"
            "past the end of the free list before anybody had counted."
        ),
        targets=(
            Target(
                f"{_ALLOCATOR}.alloc_decode",
                (Insert(_ROOM_ON_BOTH_SIDES, "before", Find("assign", target="swa_last_loc")),),
            ),
        ),
        affects=_RELEASES,
    ),
    Patch(
        name="locked-prefix-kept",
        kind="backport",
        reports=(29352,),
        summary="Keep full slots that a request reads when their window side is recovered",
        fault=(
            "a prefix whose window side is gone is replaced by a newcomer's slots while a running "
            "request reads the old ones, which are freed"
        ),
        cases=(
            "locked_prefix_recovered_in_the_legacy_tree",
            "locked_prefix_recovered_in_part_in_the_legacy_tree",
        ),
        reason=(
            "A newcomer that brought window slots for a prefix without them replaced its full\n"
            "slots too. A running request that held the prefix went on reading the old ones,\n"
            "which were free by then and given to others.\n\n"
            "The old full slots now stay and get the newcomer's window slots."
        ),
        targets=(
            Target(
                "SWARadixCache._insert_helper",
                (
                    Insert(
                        _KEEP_WHAT_IS_LOCKED.format(
                            lock="node.full_lock_ref",
                            before="total_prefix_length",
                            owner="node",
                            brought="value",
                            allocator="self.token_to_kv_pool_allocator",
                            end="prefix_len",
                            after="prefix_len",
                        ),
                        "before",
                        Find(
                            "call",
                            value="self.token_to_kv_pool_allocator.free(node.value[__])",
                            times=2,
                        ),
                    ),
                ),
            ),
        ),
        affects=_span("0.5.12", "0.5.14"),
        clear=_span("0.5.15", "0.5.23"),
    ),
    Patch(
        name="locked-prefix-kept-unified",
        kind="backport",
        reports=(29352,),
        summary="Keep full slots that a request reads when their window side is recovered",
        fault="the same in the unified tree",
        cases=(
            "locked_prefix_recovered_in_the_unified_tree",
            "locked_prefix_recovered_in_part_in_the_unified_tree",
        ),
        reason=(
            "A newcomer that brought window slots for a prefix without them replaced its full\n"
            "slots too. A running request that held the prefix went on reading the old ones,\n"
            "which were free by then and given to others.\n\n"
            "The old full slots now stay and get the newcomer's window slots."
        ),
        targets=(
            Target(
                "SWAComponent.update_component_on_insert_overlap",
                (
                    Insert(
                        _KEEP_WHAT_IS_LOCKED.format(
                            lock="node.component_data[BASE_COMPONENT_TYPE].lock_ref",
                            before="total_prefix_len",
                            owner="node.component_data[BASE_COMPONENT_TYPE]",
                            brought="value_slice",
                            allocator="self.cache.token_to_kv_pool_allocator",
                            end="",
                            after="prefix_len",
                        ),
                        "before",
                        Find(
                            "call",
                            value="self.cache.token_to_kv_pool_allocator.free(__)",
                            times=2,
                        ),
                    ),
                ),
            ),
        ),
        affects=_span("0.5.12", "0.5.14"),
        clear=_span("0.5.15", "0.5.23"),
    ),
    Patch(
        name="native-window-layers",
        kind="backport",
        reports=(),
        summary="Read window layers where they were written",
        fault=(
            "the torch_native backend writes window layers at window slots and reads them at full "
            "ones: KV of others, or out of range; up to 0.5.12.post1 it knows no window either"
        ),
        cases=(
            "native_window_layers_read",
            "native_window_layers_reach",
            "native_window_layers_see",
        ),
        reason=(
            "The torch_native backend read the KV of window layers at full slots, though it had\n"
            "written them at the window slots that those map to: wrong KV, or an index that the\n"
            "window pool does not have, unless each slot maps to itself. Up to 0.5.12.post1 a\n"
            "window layer also saw all earlier tokens (#26516).\n\n"
            "Layers of a window pool are now computed apart from the others, from the slots in\n"
            "the window only. Other layers, pools without window layers and encoder-decoder\n"
            "models are as before."
        ),
        targets=(
            Target(
                "TorchNativeAttnBackend.forward_extend",
                (
                    Insert(
                        _WINDOW_LAYER.format(what="added = forward_batch.extend_seq_lens.tolist()"),
                        "after",
                        Find("if", test="layer.is_cross_attention or __"),
                    ),
                ),
            ),
            Target(
                "TorchNativeAttnBackend.forward_decode",
                (
                    Insert(
                        _WINDOW_LAYER.format(what="causal, added = True, [1] * len(rows)"),
                        "after",
                        Find("assign", target="o_"),
                    ),
                ),
            ),
        ),
        affects=_RELEASES,
    ),
    Patch(
        name="session-last-token",
        kind="backport",
        reports=(),
        summary="Let a streaming session go on from what was computed",
        fault=(
            "with drafts, a streaming session takes the last token of a turn for cached where no "
            "verify that computes its KV follows: without overlap, and from 0.5.22 on with "
            "overlap at the end of a turn by length"
        ),
        cases=("session_after_drafts", "session_after_drafts_at_a_page"),
        reason=(
            "A verify gives one token more than it computes KV of; the next verify computes that,\n"
            "if there is one. After the end of a turn there is none without overlap, with overlap\n"
            "none where a grammar has results processed first, nor, from 0.5.22 on, where the\n"
            "end by length is foreseen. Since #28754 a streaming session took the token for\n"
            "cached where it has a slot, as it has with drafts. The next turn read what a wrong\n"
            "draft, or an earlier owner, had left there.\n\n"
            "The session now goes on from the KV that the request counts as computed.\n\n"
            "Cost: where a verify did compute it, the next turn computes this token again.\n"
            "Sessions with Mamba state are as before: nothing here says which token that is at."
        ),
        targets=(
            Target(
                "StreamingSession.try_cache_finished_req",
                (Insert(_COMPUTED_ONLY, "after", Find("assign", target="target")),),
            ),
        ),
        needs=("StreamingSession._trim_overshoot",),
        affects=_span("0.5.15", "0.5.23"),
        clear=_span("0.5.12", "0.5.14"),
    ),
)
