"""The host tier of a tree: a copy carries its witness to the host and back.

Watched are ``write`` and ``load`` of the controller that queues the copies; the object, not its
class, whose module cannot be imported everywhere. Only what the tree can prove is given a print on
its way to the host; what a load-back would bring must bear the prints of the prefix that it is
loaded for, or nothing is loaded (enforce). SGLang takes that for a lack of memory, and the prefix
is computed again. Enforce and strict wait for that one answer; observe waits for none.

Also watched is the tree's own list of fetches from a storage backend: what a fetch takes of the
host, and when it is over. What it brings gets the prints of the request that it is for; where that
is not known, the storage's own hash chain vouches. That the storage gives back what was given to it
nobody can see from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters import host_pool, retraction
from hicache_guard.adapters.host_flights import Flight, Flights, Look
from hicache_guard.adapters.host_pool import contents_of, numbers
from hicache_guard.adapters.link import AllocatorLink
from hicache_guard.adapters.recorder import length_of, request_of
from hicache_guard.core.contents import (
    UNKNOWN,
    VOUCHED,
    Contents,
    Numbers,
    fitted,
    prints,
    ticket,
    wrong_pages,
)
from hicache_guard.core.faults import Fault
from hicache_guard.core.journal import Operation
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation, describe_operation
from hicache_guard.core.transfer import to_device
from hicache_guard.core.verdict import HostCopy


@dataclass
class Fetch:
    """A fetch from a storage backend: its ticket, and the prints of what it is for, if known."""

    ticket: int
    prints: Numbers | None
    taken: bool = False


class HostTier:
    """What is known of the KV of a tree that has a host tier.

    ``full`` and ``window`` are the device pages, by what the tree holds there, or was loaded to
    them. While a load-back runs, ``expected`` are the prints of the prefix that it is for, page by
    page, None where nobody can tell. ``asked`` is the last match, of a tree with a storage backend:
    its parameters and its result; ``fetches`` are under way, by the tree's name for each.
    """

    def __init__(self, link: AllocatorLink, tree: Any) -> None:
        self.link = link
        guard, page_size = link.guard, int(tree.page_size)
        self.full = Contents(guard.full.pages + 2, page_size, guard.device)
        self.window = Contents(guard.window.pages + 2, page_size, guard.device)
        self.page_size = page_size
        self.tree = tree
        self.loading = False
        self.expected: Numbers | None = None
        self.asked: tuple[Any, Any] | None = None
        self.fetches: dict[Any, Fetch] = {}
        self.flights = Flights(tree.cache_controller, self.page_size, self._freed_in_flight)
        self._tickets = 0

    def watch(self) -> None:
        """Follow the copies of the tree's controller from now on."""
        controller = self.tree.cache_controller
        for entry in controller.mem_pool_host.entries:
            host_pool.watch(entry.host_pool, self.link.guard.device)
        self.flights.watch()
        _watch_controller(self, controller)
        _watch_storing(self, controller)
        retraction.watch(self)
        self._watch_fetches()
        if getattr(self.tree, "enable_storage", False):
            _watch_matches(self)

    def _watch_fetches(self) -> None:
        if hasattr(self.tree, "ongoing_prefetch"):  # since 0.5.13
            self.tree.ongoing_prefetch = Fetches(self, self.tree.ongoing_prefetch)

    def inserted(self, key: Any, slots: torch.Tensor, start: int) -> None:
        """The tree took over ``slots[start:]``, the pages of ``key``."""
        size = self.page_size
        found = prints(_tokens(key)[: slots.shape[0]], size, *_namespace(key))
        first, end = -(-start // size), slots.shape[0] // size
        rows = slots[first * size : end * size]
        self.full.write(rows, torch.from_numpy(found[first:end]))

    def expect(self, req: Any) -> None:
        """A load-back for a request begins, or for nobody that is known."""
        self.loading = True
        if req is not None:
            tokens = [*req.origin_input_ids, *req.output_ids]
            self.expected = prints(tokens, self.page_size, *_namespace(req))

    def forget(self) -> None:
        """The tree was emptied."""
        self.full.forget()
        self.window.forget()
        self.fetches.clear()
        self.flights.forget()
        self.asked = None
        self._watch_fetches()

    def done(self) -> None:
        """The load-back ended."""
        self.loading, self.expected = False, None

    def full_prints(self, slots: torch.Tensor) -> torch.Tensor:
        """What full slots (int64, whole pages) hold, as far as the tree can prove it."""
        held = self.link.guard.witness.resident(slots[:: self.page_size])
        return torch.where(held, self.full.read(slots), UNKNOWN)

    def window_prints(self, slots: torch.Tensor) -> torch.Tensor:
        """As ``full_prints`` of window slots, by the full slots that own them."""
        guard = self.link.guard
        owner, mapping = guard.map.owner, guard.map.mapping
        heads = slots[:: self.page_size]
        rows = owner.index_select(0, heads.clamp(0, owner.shape[0] - 1)).to(torch.int64)
        entries = mapping.index_select(0, rows)
        held = (entries == heads) & guard.witness.live(rows, guard.map, entries)
        return torch.where(held, self.full.read_each(rows), UNKNOWN)

    def loaded(self, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks (bool) of the slots of a path that hold what they must, full side and window side.

        By the prints that came back with them; to be asked when the mapping is rebuilt.
        """
        size, entries = self.page_size, self.link.guard.map.mapping.index_select(0, path)
        full, window = self.full.read(path), self.window.read(entries)
        due = full
        if self.expected is not None:
            due = to_device(torch.from_numpy(fitted(self.expected, full.shape[0])), full.device)
        masks = []
        for found in (full, window):
            good = (found == due) & (due != UNKNOWN) | (found == VOUCHED)
            masks.append(good.repeat_interleave(size)[: path.shape[0]])
        return masks[0], masks[1]

    # -- fetches from a storage backend ----------------------------------------------------------

    def fetch_takes(self, name: Any, entry: Any) -> None:
        """A fetch is entered into the tree's list, or what it takes of the host is."""
        fetch = self.fetches.get(name)
        if fetch is None:
            fetch = Fetch(self.next_ticket(), self._prints_for(name, entry[1]))
            self.fetches[name] = fetch
        if entry[2] is None or fetch.taken:
            return
        fetch.taken = True
        self._host_contents().write(entry[2], fetch.ticket)
        for part in _staged(entry):
            self._host_contents(part).write(part.host_indices, fetch.ticket)

    def fetch_ends(self, name: Any, entry: Any) -> None:
        """A fetch leaves the tree's list: what it brought is in the tree, or given back."""
        fetch = self.fetches.pop(name, None)
        if fetch is None or not fetch.taken:
            return
        operation, size = entry[3], self.page_size
        slots = entry[2][: int(operation.completed_tokens) // size * size]
        found: torch.Tensor | int = VOUCHED
        if fetch.prints is not None:
            found = torch.from_numpy(fitted(fetch.prints, len(slots) // size))
        self._host_contents().exchange(slots, fetch.ticket, found)
        places = {key: page for page, key in enumerate(operation.hash_value or ())}
        for part in _staged(entry):
            pages = [places.get(key, -1) for key in part.keys or ()]
            slots = part.host_indices[: len(pages) * size]
            if fetch.prints is not None:
                # A place that is not among them is the UNKNOWN at the end.
                chosen = fitted(fetch.prints, len(fetch.prints) + 1)
                chosen = chosen[np.asarray(pages, dtype=np.int64)]
                found = torch.from_numpy(chosen[: -(-slots.shape[0] // size)])
            self._host_contents(part).exchange(slots, fetch.ticket, found)

    def next_ticket(self) -> int:
        """A ticket that nobody has yet."""
        self._tickets += 1
        return ticket(self._tickets)

    def _prints_for(self, name: Any, key: Any) -> Numbers | None:
        """The prints of what a fetch is for, which goes on where the last match ended."""
        if self.asked is None:
            return None
        params, result = self.asked
        if request_of(params) not in (None, getattr(name, "rid", name)):
            return None
        start = length_of(result) + int(result.host_hit_length)
        whole, more = _tokens(params.key), _tokens(key)
        both = min(len(whole) - start, len(more))
        if both < 0 or start % self.page_size or list(whole[start:][:both]) != list(more[:both]):
            return None
        return prints([*whole[:start], *more], self.page_size, *_namespace(key))[
            start // self.page_size :
        ]

    def _host_contents(self, part: Any = None) -> Contents:
        """What the full host pool holds, or that of a transfer of window KV."""
        host = self.tree.cache_controller.mem_pool_host
        entry = host.anchor_entry if part is None else host.entry_map[part.name]
        return contents_of(entry.host_pool)

    def refuses(self, full: torch.Tensor, windows: Sequence[torch.Tensor]) -> bool:
        """Whether a load-back of pages of these prints must not be; reported if any is wrong."""
        known, parts = self.expected, [full, *windows]
        ends = np.cumsum([part.shape[0] for part in parts])[:-1]

        def judge(found: Numbers, operation: Operation) -> bool:
            run, *others = np.split(found, ends)
            wrong = wrong_pages(run, others, known)
            return bool(wrong) and self.reports(Fault.STALE_HOST_COPY, wrong, operation)

        with self.link.operation("load"):
            return bool(self.link.guard.when_known(HostCopy(torch.cat(parts)), judge))

    def reports(self, fault: Fault, pages: int, operation: Operation) -> bool:
        """Report host ``pages``; whether what was asked for must not be done."""
        guard = self.link.guard
        violation = Violation(
            fault=fault,
            pool="host",
            slot=-1,
            page=-1,
            slots=pages * self.page_size,
            operation=describe_operation(operation),
            request=operation.request,
        )
        guard.count(violation, operation)
        return guard.mode is Mode.ENFORCE

    def _freed_in_flight(self, pages: int) -> bool:
        """Report that host ``pages`` are freed under a copy; False where that is all."""
        with self.link.operation("free of host pages"):
            return self.reports(Fault.FREED_IN_FLIGHT, pages, self.link.guard.current)


def _namespace(holder: Any) -> tuple[object, object]:
    """What separates equal tokens of a key, or of a request."""
    return getattr(holder, "extra_key", None), getattr(holder, "cache_salt", None) or None


def _window_parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The transfers of window KV of a call; what moves with the full side is not among them."""
    transfers = kwargs.get("extra_pools", args[2] if len(args) > 2 else None)
    return [part for part in transfers or () if part.name.name == "SWA"]


def _staged(entry: Any) -> list[Any]:
    """The transfers of window KV of a fetch that have their place on the host."""
    parts = [part for parts in entry[5].values() for part in parts]
    return [part for part in parts if part.name.name == "SWA" and part.host_indices is not None]


def _tokens(key: Any) -> Sequence[int]:
    """The tokens of a key."""
    found: Sequence[int] = key.raw_token_ids() if hasattr(key, "raw_token_ids") else key.token_ids
    return found


class Fetches(dict[Any, Any]):
    """A tree's list of the fetches that are under way, which says who comes and who goes.

    Every release enters a fetch when it is asked for, again when its place on the host is known,
    and takes it out when what it brought was taken over, or given back.
    """

    def __init__(self, tier: HostTier, entries: Mapping[Any, Any]) -> None:
        super().__init__(entries)
        self._tier = tier

    def __setitem__(self, name: Any, entry: Any) -> None:
        super().__setitem__(name, entry)
        self._tier.fetch_takes(name, entry)

    def __delitem__(self, name: Any) -> None:
        entry = self[name]
        super().__delitem__(name)
        self._tier.fetch_ends(name, entry)

    def pop(self, name: Any, *default: Any) -> Any:
        if name in self:
            entry = self[name]
            del self[name]
            return entry
        return super().pop(name, *default)


def _watch_matches(tier: HostTier) -> None:
    """Remember what was asked last, and what was found: a fetch goes on from there."""
    original = tier.tree.match_prefix

    def match_prefix(params: Any) -> Any:
        result = original(params)
        tier.asked = params, result
        return result

    tier.tree.match_prefix = match_prefix


def _watch_controller(tier: HostTier, controller: Any) -> None:
    original_write, original_load = controller.write, controller.load
    host, flights = controller.mem_pool_host, tier.flights
    anchor = host.anchor_entry.host_pool

    def write(device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host_indices = original_write(device_indices, *args, **kwargs)
        if host_indices is None:
            return None
        flight = Flight([], backup=True)
        if device_indices.numel():
            _take(flight, anchor, host_indices, device_indices, tier.full_prints)
        for part in _window_parts(args, kwargs):
            if part.device_indices is not None and part.host_indices is not None:
                pool = host.entry_map[part.name].host_pool
                _take(flight, pool, part.host_indices, part.device_indices, tier.window_prints)
        flights.queued(flight, controller.write_queue, controller.ack_write_queue)
        return host_indices

    def load(host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = [p for p in _window_parts(args, kwargs) if p.host_indices is not None]
        pools = [host.entry_map[part.name].host_pool for part in parts]
        copied = [(anchor, host_indices)]
        copied += [(pool, part.host_indices) for pool, part in zip(pools, parts, strict=True)]
        if tier.loading:
            found, *others = [contents_of(pool).read(slots) for pool, slots in copied]
            if tier.refuses(found, others):
                return None
        device_indices = original_load(host_indices, *args, **kwargs)
        if device_indices is not None:
            used = [(pool, numbers(slots)) for pool, slots in copied]
            flights.queued(Flight(used), controller.load_queue, [])
            if tier.loading:
                tier.full.write(device_indices, found)
                for part, other in zip(parts, others, strict=True):
                    tier.window.write(part.device_indices, other)
        return device_indices

    controller.write, controller.load = write, load


def _take(flight: Flight, pool: Any, host: torch.Tensor, device: torch.Tensor, look: Look) -> None:
    """A backup takes device pages to host pages, and their prints with them."""
    books, source = contents_of(pool), device.to(torch.int64)
    found = look(source)
    books.write(host, found)
    flight.slots.append((pool, numbers(host)))
    flight.taken.append((books, host, source, look, found))


def _watch_storing(tier: HostTier, controller: Any) -> None:
    """A thread copies host pages to the storage until the tree's list of backups says so."""
    original = getattr(controller, "write_storage", None)
    if original is None:
        return
    host, tree = controller.mem_pool_host, tier.tree

    def write_storage(host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        number = original(host_indices, *args, **kwargs)
        used = [(host.anchor_entry.host_pool, numbers(host_indices))]
        for part in kwargs.get("extra_pools") or ():
            if part.name.name == "SWA" and part.host_indices is not None:
                used.append((host.entry_map[part.name].host_pool, numbers(part.host_indices)))
        over = lambda: number not in tree.ongoing_backup  # noqa: E731
        tier.flights.add(Flight(used, over=over))
        return number

    controller.write_storage = write_storage
