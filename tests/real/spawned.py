"""A process that starts as SGLang's scheduler does: spawned, and the plugins loaded first.

``run_scheduler_process`` calls ``load_plugins`` before it does anything else; its own module needs
a GPU build to import. Run as a script, it spawns a child and prints what came of it; the parent, as
SGLang's, is not guarded by itself.
"""

from __future__ import annotations

import multiprocessing


def scheduler() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print("plugins loaded", flush=True)
    from hicache_guard.repro.pools import build, extend

    pool = build()
    slots = extend(pool, 8)
    print("guarded" if hasattr(pool, "_hicache_guard_link") else "unguarded", flush=True)
    pool.free(slots)
    try:
        pool.free(slots)
    except Exception as error:
        print(type(error).__name__, str(error).split(":")[0], flush=True)


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=scheduler)
    child.start()
    child.join()
    print("exit code", child.exitcode)
