"""The host tier of a tree: a copy carries its witness to the host and back.

Watched are ``write`` and ``load`` of the controller that queues the copies, and ``alloc`` of the
host pools; objects, not classes, since their modules cannot be imported everywhere. Only what the
tree can prove is given a print on its way to the host; what a load-back would bring must bear the
prints of the prefix that it is loaded for, or nothing is loaded (enforce). SGLang takes that for a
lack of memory, and the prefix is computed again. A page that came from a storage backend bears no
print; the storage's own hash chain vouches for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters.link import AllocatorLink
from hicache_guard.core.contents import UNKNOWN, Contents, Numbers, prints
from hicache_guard.core.faults import Fault
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation, describe_operation

#: The attribute under which a host pool holds what its pages hold.
ATTRIBUTE = "_hicache_guard_contents"


class HostTier:
    """What is known of the KV of a tree that has a host tier.

    ``full`` and ``window`` are the device pages, by what the tree holds there, or was loaded to
    them. While a load-back runs, ``expected`` are the prints of the prefix that it is for, page by
    page, None where nobody can tell; ``stored`` says whether pages may come from a storage backend.
    """

    def __init__(self, link: AllocatorLink, tree: Any) -> None:
        self.link = link
        guard, page_size = link.guard, int(tree.page_size)
        self.full = Contents(guard.full.pages + 2, page_size)
        self.window = Contents(guard.window.pages + 2, page_size)
        self.page_size = page_size
        self.tree = tree
        self.loading = False
        self.stored = False
        self.expected: Numbers | None = None

    def watch(self) -> None:
        """Follow the copies of the tree's controller from now on."""
        controller = self.tree.cache_controller
        for entry in controller.mem_pool_host.entries:
            _watch_alloc(entry.host_pool)
        _watch_controller(self, controller)

    def inserted(self, key: Any, slots: torch.Tensor, start: int) -> None:
        """The tree took over ``slots[start:]``, the pages of ``key``."""
        tokens = key.raw_token_ids() if hasattr(key, "raw_token_ids") else key.token_ids
        found = prints(tokens[: slots.shape[0]], self.page_size, *_namespace(key))
        first = -(-start // self.page_size)
        rows = _numbers(slots)[first * self.page_size :]
        self.full.write(rows, found[first : slots.shape[0] // self.page_size])

    def expect(self, req: Any) -> None:
        """A load-back for a request begins, or for nobody that is known."""
        self.loading, self.stored = True, bool(self.tree.enable_storage)
        if req is not None:
            tokens = [*req.origin_input_ids, *req.output_ids]
            self.expected = prints(tokens, self.page_size, *_namespace(req))

    def forget(self) -> None:
        """The tree was emptied."""
        self.full.forget()
        self.window.forget()

    def done(self) -> None:
        """The load-back ended."""
        self.loading, self.expected = False, None

    def full_prints(self, slots: torch.Tensor) -> Numbers:
        """What full slots (int64, whole pages) hold, as far as the tree can prove it."""
        held = self.link.guard.witness.resident(slots)
        return self._where(held, self.full.read(_numbers(slots)))

    def window_prints(self, slots: torch.Tensor) -> Numbers:
        """As ``full_prints`` of window slots, by the full slots that own them."""
        guard = self.link.guard
        owner, mapping = guard.map.owner, guard.map.mapping
        rows = owner.index_select(0, slots.clamp(0, owner.shape[0] - 1)).to(torch.int64)
        entries = mapping.index_select(0, rows)
        held = (entries == slots) & guard.witness.live(rows, guard.map, entries)
        return self._where(held, self.full.read(_numbers(rows)))

    def _where(self, held: torch.Tensor, found: Numbers) -> Numbers:
        return np.where(_numbers(held)[:: self.page_size] != 0, found, UNKNOWN)

    def loaded(self, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks (bool) of the slots of a path that hold what they must, full side and window side.

        By the prints that came back with them; to be asked when the mapping is rebuilt.
        """
        size = self.page_size
        entries = self.link.guard.map.mapping.index_select(0, path)
        full, window = self.full.read(_numbers(path)), self.window.read(_numbers(entries))
        due = full if self.expected is None else _fitted(self.expected, full.shape[0])
        masks = []
        for found in (full, window):
            good = (found == due) & (due != UNKNOWN)
            if self.stored:
                good |= found == UNKNOWN
            mask = torch.from_numpy(np.repeat(good, size)[: path.shape[0]])
            masks.append(mask.to(path.device))
        return masks[0], masks[1]

    def refuses(self, pages: int) -> bool:
        """Report that ``pages`` of a load-back are not this prefix's; False where that is all."""
        guard = self.link.guard
        with self.link.operation("load"):
            operation = guard.current
            guard.count(
                Violation(
                    fault=Fault.STALE_HOST_COPY,
                    pool="host",
                    slot=-1,
                    page=-1,
                    slots=pages * self.page_size,
                    operation=describe_operation(operation),
                    request=operation.request,
                )
            )
        return guard.mode is Mode.ENFORCE


def contents_of(pool: Any) -> Contents:
    """What the pages of a host pool hold."""
    found: Contents | None = pool.__dict__.get(ATTRIBUTE)
    if found is None:
        size = int(pool.page_size)
        found = vars(pool)[ATTRIBUTE] = Contents(int(pool.size) // size + 2, size)
    return found


def _numbers(slots: torch.Tensor) -> Numbers:
    return slots.detach().to("cpu", torch.int64).numpy()


def _namespace(holder: Any) -> tuple[object, object]:
    """What separates equal tokens of a key, or of a request."""
    return getattr(holder, "extra_key", None), getattr(holder, "cache_salt", None) or None


def _window_parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The transfers of window KV of a call; what moves with the full side is not among them."""
    transfers = kwargs.get("extra_pools", args[2] if len(args) > 2 else None)
    return [part for part in transfers or () if part.name.name == "SWA"]


def _watch_alloc(pool: Any) -> None:
    """What a host page held is not known any more once it is handed out."""
    original = pool.alloc

    def alloc(*args: Any, **kwargs: Any) -> Any:
        slots = original(*args, **kwargs)
        if slots is not None and len(slots):
            contents_of(pool).write(_numbers(slots), UNKNOWN)
        return slots

    pool.alloc = alloc


def _watch_controller(tier: HostTier, controller: Any) -> None:
    original_write, original_load = controller.write, controller.load
    host = controller.mem_pool_host
    full = contents_of(host.anchor_entry.host_pool)

    def write(device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host_indices = original_write(device_indices, *args, **kwargs)
        if host_indices is None:
            return None
        if device_indices.numel():
            found = tier.full_prints(device_indices.to(torch.int64))
            full.write(_numbers(host_indices), found)
        for part in _window_parts(args, kwargs):
            if part.device_indices is not None and part.host_indices is not None:
                found = tier.window_prints(part.device_indices.to(torch.int64))
                window = contents_of(host.entry_map[part.name].host_pool)
                window.write(_numbers(part.host_indices), found)
        return host_indices

    def load(host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tier.loading:
            return original_load(host_indices, *args, **kwargs)
        parts = _window_parts(args, kwargs)
        found = full.read(_numbers(host_indices))
        others = [
            contents_of(host.entry_map[part.name].host_pool).read(_numbers(part.host_indices))
            for part in parts
        ]
        wrong = _wrong_pages(tier, found, others)
        if wrong and tier.refuses(wrong):
            return None
        device_indices = original_load(host_indices, *args, **kwargs)
        if device_indices is not None:
            tier.full.write(_numbers(device_indices), found)
            for part, other in zip(parts, others, strict=True):
                tier.window.write(_numbers(part.device_indices), other)
        return device_indices

    controller.write, controller.load = write, load


def _wrong_pages(tier: HostTier, full: Numbers, window: Sequence[Numbers]) -> int:
    """How many pages that the host would give are not what the prefix is made of."""
    known = tier.expected
    if known is None:
        wrong = [found == UNKNOWN for found in (full, *window)]
    else:
        # A print tells its place in the prefix, too; full pages come in a row, window pages from
        # here and there.
        places = np.flatnonzero(known == full[0]) if full.shape[0] else np.zeros(1, dtype=np.int64)
        due = _fitted(known[places[0] :] if places.shape[0] else known[:0], full.shape[0])
        wrong = [
            (full != due) | (full == UNKNOWN),
            *(~np.isin(found, known) for found in window),
        ]
    if tier.stored:
        wrong = [bad & (f != UNKNOWN) for bad, f in zip(wrong, (full, *window), strict=True)]
    return sum(int(bad.sum()) for bad in wrong)


def _fitted(found: Numbers, pages: int) -> Numbers:
    """``found``, cut or filled up to ``pages``."""
    found = found[:pages]
    return np.pad(found, (0, pages - found.shape[0]), constant_values=UNKNOWN)
