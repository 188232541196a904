"""The independent audit: who owns which page, read from SGLang's own state and nothing of ours.

Plain Python sets over the release's free lists, its mapping, and the books of the driver. It shares
no code with the guard, so that the two can check each other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch

#: Request name to the full slots that it believes to own.
Books = dict[str, torch.Tensor]


def free_pages(pool: Any) -> list[int]:
    """Page ids in every container of a sub-allocator's free list."""
    pages: list[int] = pool.free_pages.tolist()
    if getattr(pool, "release_pages", None) is not None:
        pages += pool.release_pages.tolist()
    for staged in getattr(pool, "staged_pages", []):
        pages += staged.tolist()
    return pages


def full_pages(allocator: Any, held: torch.Tensor) -> set[int]:
    return {slot // allocator.page_size for slot in held.tolist()}


def window_pages(allocator: Any, held: torch.Tensor) -> set[int]:
    """Window pages that the mapping gives for the full slots ``held``."""
    mapping = allocator.full_to_swa_index_mapping
    entries = [int(mapping[slot]) for slot in held.tolist() if 0 <= slot < mapping.numel() - 1]
    return {entry // allocator.page_size for entry in entries if entry > 0}


def audit(allocator: Any, books: Books) -> list[str]:
    """What is wrong with the pools, as sentences; empty when nothing is.

    Each page must be either free, once, or owned by one request; the padding page is neither.
    """
    faults = []
    sides = (
        ("full", allocator.full_attn_allocator, full_pages),
        ("window", allocator.swa_attn_allocator, window_pages),
    )
    for side, pool, pages_of in sides:
        count = pool.size // allocator.page_size
        free = Counter(free_pages(pool))
        owners: dict[int, list[str]] = {}
        for request, held in books.items():
            for page in pages_of(allocator, held):
                owners.setdefault(page, []).append(request)
        for page, times in sorted(free.items()):
            if page == 0:
                faults.append(f"{side}: the padding page is in the free list")
            elif not 0 < page <= count:
                faults.append(f"{side}: page {page}, which does not exist, is in the free list")
            elif times > 1:
                faults.append(f"{side}: page {page} is {times} times in the free list")
        for page, names in sorted(owners.items()):
            if len(names) > 1:
                faults.append(f"{side}: page {page} has two owners, {' and '.join(names)}")
            if page in free:
                faults.append(f"{side}: page {page} of {names[0]} is in the free list")
        lost = set(range(1, count + 1)) - set(free) - set(owners)
        if lost:
            faults.append(f"{side}: lost pages {', '.join(map(str, sorted(lost)))}")
    padding = allocator.page_size
    for request, held in books.items():
        mapping = allocator.full_to_swa_index_mapping
        inside = [slot for slot in held.tolist() if 0 < int(mapping[slot]) < padding]
        if inside:
            faults.append(f"window: slots {inside} of {request} are mapped into the padding page")
    if int(allocator.full_to_swa_index_mapping[-1]) != -1:
        faults.append("mapping: its sentinel was overwritten")
    return faults


def fingerprint(allocator: Any) -> str:
    """A digest of everything that decides what the allocator does next, bit for bit."""
    digest = hashlib.sha256()
    for pool in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        for page in free_pages(pool):
            digest.update(page.to_bytes(8, "little", signed=True))
        digest.update(b"|")
    digest.update(allocator.full_to_swa_index_mapping.numpy().tobytes())
    groups = (
        "is_not_in_free_group",
        "free_group",
        "swa_free_group",
        "swa_page_ids_group",
        "free_page_ids_group",
    )
    for holder in (allocator, allocator.full_attn_allocator, allocator.swa_attn_allocator):
        for name in groups:
            value = vars(holder).get(name)
            parts = [part.tolist() for part in value] if isinstance(value, list) else value
            digest.update(f"{name}={parts};".encode())
    return digest.hexdigest()
