"""The seam of streaming sessions: a row that a session put by is looked at before it is lent again.

Between the turns of a session its KV stays in a row that no tree holds. Nothing matches tokens
against it, so it is proved as a whole: what the row names is what it named when it was put by.
Where that cannot be proved the session is released, and the turn is computed from the tree or from
scratch, which is what SGLang itself does with a row that it cannot use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.link import AllocatorLink, link_of

#: The attribute under which a session cache holds when each row was put by, and how long it was:
#: (moment, tokens) by session.
ATTRIBUTE = "_hicache_guard_rows"

Method = Callable[..., Any]


def try_cache_finished_req(original: Method, sessions: Any, req: Any, *args: Any, **kw: Any) -> Any:
    # The second time that it is put by, as after a retraction, a request is taken out of it.
    session = None if req.session is None else req.session.session_id
    kept = original(sessions, req, *args, **kw)
    link, known = _link(sessions), vars(sessions).setdefault(ATTRIBUTE, {})
    if session not in sessions.slots:
        known.pop(session, None)  # its turn was aborted
    elif kept and link is not None:
        length = _row(_holder(sessions), sessions.slots[session]).shape[0]
        known[session] = (link.guard.moment, length)
    return kept


def release_session(original: Method, sessions: Any, session_id: str) -> Any:
    vars(sessions).get(ATTRIBUTE, {}).pop(session_id, None)
    return original(sessions, session_id)


def find_active_slot(original: Method, sessions: Any, req: Any) -> Any:
    slot = original(sessions, req)
    link = _link(sessions) if slot is not None else None
    if link is None:
        return slot
    session = req.session.session_id
    moment, length = vars(sessions).get(ATTRIBUTE, {}).get(session, (0, -1))
    holder = _holder(sessions)
    row = _row(holder, slot)
    if row.shape[0] != length:
        return slot  # its turn runs: the row is the request's
    need = int(holder.sliding_window_size or 0)
    guard = link.guard
    check = lambda: guard.check_row(row, need, guard.serial_at(moment))  # noqa: E731
    if link.judged("find_active_slot", req.rid, check):
        return slot
    sessions.release_session(session)
    return None


def _holder(sessions: Any) -> Any:
    """The tree that a session cache belongs to."""
    return sessions.cache if hasattr(sessions, "cache") else sessions.inner


def _link(sessions: Any) -> AllocatorLink | None:
    allocator = getattr(_holder(sessions), "token_to_kv_pool_allocator", None)
    link = None if allocator is None else link_of(allocator)
    return link if isinstance(link, AllocatorLink) else None


def _row(holder: Any, slot: Any) -> torch.Tensor:
    """The full slots (int64) of what a session has committed."""
    record = slot if hasattr(slot, "kv_committed_len") else slot.kv
    row = holder.req_to_token_pool.req_to_token[record.req_pool_idx]
    return row[: record.kv_committed_len].to(torch.int64)  # type: ignore[no-any-return]
