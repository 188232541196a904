"""What a server says of itself: the first step of the article's checklist.

Only what its public API tells; what that does not tell is said to be assumed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hicache_guard.audit.wire import MALFORMED, Wire, WireError
from hicache_guard.core.errors import GuardError, printable

#: What is assumed of a model that does not say.
WINDOW, VOCABULARY, CONTEXT = 128, 1000, 4096
#: The type of a model that does not say: the coarsest is assumed.
UNTOLD = "unknown"
#: Less of these is too little for any prompt that shows something.
LEAST_CONTEXT, LEAST_VOCABULARY = 256, 100


class UnfitError(GuardError):
    """The server cannot be audited as it was started."""


@dataclass(frozen=True)
class Facts:
    """The engine's identity. Lengths are in tokens; ``assumed`` names what was not told.

    ``context`` is what a prompt and its answer may have together: SGLang shortens an answer that
    does not fit the pool with the prompt's whole pages and one more.
    """

    version: str
    model: str
    architecture: str
    dtype: str
    window: int
    page: int
    chunk: int
    context: int
    vocabulary: int
    full_pool: int
    window_pool: int
    running: int
    tree: str
    hierarchical: str
    host_tokens: int
    speculative: str
    disaggregation: str
    storage: str
    streaming: bool
    overlap: bool
    attention: str
    router: str
    parallel: str
    assumed: tuple[str, ...] = ()

    def rows(self) -> dict[str, str]:
        """For a table: name and value."""
        found = {name: str(value) for name, value in asdict(self).items() if name != "assumed"}
        return {
            name: f"{value} (assumed)" if name in self.assumed else value
            for name, value in found.items()
        }


def _number(*found: Any) -> int:
    """The first that is a positive number, else 0."""
    return next((int(one) for one in found if isinstance(one, int | float) and one >= 1), 0)


def _config(folder: str) -> dict[str, Any]:
    """A model's own description, where it lies on this machine."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def ask(wire: Wire, *, window: int | None = None, vocabulary: int | None = None) -> Facts:
    """What a server is. ``window`` and ``vocabulary`` are for a model that does not say.

    Raises WireError for what no server says, and UnfitError for one that cannot be audited.
    """
    try:
        found = _asked(wire, window, vocabulary)
    except MALFORMED as error:
        raise WireError(
            f"{wire.url}/server_info: not what SGLang answers there ({error!r})"
        ) from None
    plain: dict[str, Any] = {
        name: printable(one) for name, one in vars(found).items() if isinstance(one, str)
    }
    return replace(found, **plain)


def _asked(wire: Wire, window: int | None, vocabulary: int | None) -> Facts:
    server = wire.server_info()
    try:
        model = wire.model_info()
    except WireError:
        model = {}
    folder = str(server.get("model_path") or model.get("model_path") or "")
    config = _config(folder)
    config = config | (config.get("text_config") or {})
    states = server.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    memory = state.get("memory_usage") or {}
    assumed = []

    def known(name: str, usual: int, *found: Any) -> int:
        number = _number(*found)
        if not number:
            assumed.append(name)
        return number or usual

    page = known("page", 1, server.get("page_size"))
    context = known(
        "context", CONTEXT, server.get("context_length"), config.get("max_position_embeddings")
    )
    full = known(
        "full_pool", 1 << 16, server.get("max_total_num_tokens"), memory.get("token_capacity"),
        server.get("max_total_tokens"),
    )  # fmt: skip
    ratio = server.get("swa_full_tokens_ratio")
    windowed = _number(memory.get("swa_token_capacity"), server.get("swa_max_total_num_tokens"))
    if not windowed:
        assumed.append("window_pool")
        windowed = int(full * ratio) if isinstance(ratio, int | float) else full
    if server.get("disable_radix_cache"):
        raise UnfitError(f"{wire.url}: the server runs with --disable-radix-cache: no cache")
    mode = str(server.get("disaggregation_mode") or "null").replace("null", "no")
    if mode != "no" and not wire.behind:
        raise UnfitError(f"{wire.url}: a {mode} server of a pair; give the URL of its router")
    if (dtype := _dtype(server, config)) == UNTOLD:
        assumed.append("dtype")
    tokens = known("vocabulary", VOCABULARY, vocabulary, config.get("vocab_size"))
    for what, found, least in (
        ("a request has at most", context := min(context, full - page) - page, LEAST_CONTEXT),
        ("there are", tokens, LEAST_VOCABULARY),
    ):
        if found < least:
            raise UnfitError(f"{wire.url}: {what} {found} tokens; an audit takes {least}")
    return Facts(
        version=str(server.get("version") or "unknown"),
        model=folder or "unknown",
        architecture=", ".join(config.get("architectures") or ["unknown"]),
        dtype=dtype,
        window=known("window", WINDOW, window, config.get("sliding_window")),
        page=page,
        chunk=known("chunk", 0, server.get("chunked_prefill_size")),
        context=context,
        vocabulary=tokens,
        full_pool=full,
        window_pool=windowed,
        running=known("running", 8, server.get("max_running_requests")),
        tree="unified" if server.get("enable_unified_radix_tree") else "the release's default",
        hierarchical=str(server.get("hicache_write_policy"))
        if server.get("enable_hierarchical_cache")
        else "no",
        host_tokens=int(full * _ratio(server)) if server.get("enable_hierarchical_cache") else 0,
        speculative=str(server.get("speculative_algorithm") or "no"),
        disaggregation="no" if mode == "no" else "prefill and decode",
        storage=str(server.get("hicache_storage_backend") or "no"),
        streaming=bool(server.get("enable_streaming_session")),
        overlap=not server.get("disable_overlap_schedule"),
        attention=str(server.get("attention_backend") or "unknown"),
        router=", ".join(
            f"{count} {role}" for role, count in Counter(one.role for one in wire.behind).items()
        )
        or "no",
        parallel=f"tp {server.get('tp_size', 1)}, dp {server.get('dp_size', 1)}",
        assumed=tuple(assumed),
    )


def _ratio(server: dict[str, Any]) -> float:
    found = server.get("hicache_ratio")
    return float(found) if isinstance(found, int | float) else 2.0


def _dtype(server: dict[str, Any], config: dict[str, Any]) -> str:
    told = server.get("dtype")
    if told in (None, "auto"):
        told = config.get("dtype") or config.get("torch_dtype") or UNTOLD
    return {"half": "float16", "float": "float32"}.get(str(told), str(told))
