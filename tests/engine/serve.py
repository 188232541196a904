"""A real engine of the release on the path, whose window layers read what its backend gathered.

The Triton backend is the release's own, all but the two attention kernels at its end (``shim``).
Requests that share prefixes run together, on a warm cache and small pools, once in each play: a
mode of the guard, a way to schedule, a fault or none. What they must answer is what each answers
alone, with an empty cache, unguarded and without a fault.

Prints one JSON line a play. SGLang is imported once, and engines are forked: one starts within two
seconds, and not within 20. Run with ``shim`` and an unpacked release on PYTHONPATH:
``TRITON_INTERPRET=1 SGLANG_USE_CPU_ENGINE=1 python serve.py FOLDER PLAY...``, where a play is
spelled ``enforce/overlap/freed``, and FOLDER gets the model.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model

#: Tokens that mean nothing special to the model.
WORDS = range(10, model.WORDS)
#: Tokens of the full pool, of a chunk, and of the longest prompt but one.
POOL, CHUNK, LONGEST = 1500, 64, 200


def imported() -> None:
    """Import what an engine's processes import, of the models only ours; and have them forked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sglang = importlib.import_module("sglang")
    models = pkgutil.iter_modules([str(Path(sglang.__path__[0]) / "srt" / "models")])
    others = sorted(module.name for module in models if module.name != "laguna")
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    importlib.import_module("sglang.srt.managers.scheduler")
    importlib.import_module("sglang.srt.entrypoints.engine")
    start: Callable[..., None] = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: start("fork", force=True)


def engine(folder: Path, *, overlap: bool) -> Any:
    import sglang

    return sglang.Engine(
        model_path=str(folder),
        device="cpu",
        attention_backend="triton",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=not overlap,
        page_size=1,
        max_total_tokens=POOL,
        max_running_requests=8,
        context_length=POOL - 100,
        chunked_prefill_size=CHUNK,
        random_seed=1,
        host="127.0.0.1",
        log_level=os.environ.get("ENGINE_LOG", "error"),
    )


Asked = tuple[list[int], int]


def requests() -> list[list[Asked]]:
    """Prompts that are asked together, and how many tokens each is to generate.

    In the first group the second begins as the first, whose last chunk leaves room for it. The
    second group is a long prompt for itself. Of the others most begin as an earlier one does.
    """
    dice = random.Random(0)
    first, long = (dice.choices(WORDS, k=CHUNK * chunks + 10) for chunks in (3, 5))
    groups = [[(first, 20), (first[: CHUNK * 3 - 6] + dice.choices(WORDS, k=5), 20)], [(long, 20)]]
    bases = [dice.choices(WORDS, k=dice.randint(LONGEST // 2, LONGEST)) for _ in range(4)]
    for size in (3, 1, 2):
        group = []
        for _ in range(size):
            base = dice.choice(bases)
            prompt = base[: dice.randint(20, len(base))] + dice.choices(
                WORDS, k=dice.randint(1, 30)
            )
            bases[dice.randrange(len(bases))] = prompt[:LONGEST]
            group.append((prompt[:LONGEST], dice.randint(12, 40)))
        groups.append(group)
    return groups


async def _generated(server: Any, prompt: list[int], count: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    found: dict[str, Any] = await server.async_generate(input_ids=prompt, sampling_params=sampling)
    return found


def together(server: Any) -> list[dict[str, Any]]:
    """Every request, group by group."""

    async def all_of_them() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for group in requests():
            answers += await asyncio.gather(*(_generated(server, *one) for one in group))
        return answers

    found: list[dict[str, Any]] = server.loop.run_until_complete(all_of_them())
    return found


def alone(server: Any) -> list[dict[str, Any]]:
    """Every request for itself, with an empty cache."""
    found = []
    for one in itertools.chain.from_iterable(requests()):
        while not server.flush_cache().success:  # the last one is not quite over
            time.sleep(0.01)
        found.append(server.loop.run_until_complete(_generated(server, *one)))
        assert found[-1]["meta_info"]["cached_tokens"] == 0, "the cache was not empty"
    return found


def play(folder: Path, spelled: str, right: list[list[int]] | None) -> dict[str, Any]:
    """What was answered amiss in a play; without ``right`` answers, what is answered alone."""
    mode, way, fault = spelled.split("/")
    os.environ |= {"HICACHE_GUARD": mode, "ENGINE_FAULT": fault.replace("none", "")}
    # Where a fault is not contained, or is one to the tree, its own check ends the server when it
    # is idle, and nothing would be answered.
    contained = mode == "enforce" and fault not in ("chunk", "shared")
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = str(contained)
    server = engine(folder, overlap=way == "overlap")
    answers = alone(server) if right is None else together(server)
    tokens = [answer["output_ids"] for answer in answers]
    found = server.get_server_info()["internal_states"][0]["engine"]
    server.shutdown()
    if right is None:
        return {"right": tokens}
    return {
        "apart": [number for number, one in enumerate(tokens) if one != right[number]],
        "hits": sum(answer["meta_info"]["cached_tokens"] > 0 for answer in answers),
        **found,
    }


def forked(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function says in a process of its own; how that ended, if it said nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgrp()  # an engine that gives up takes its whole group along
        try:
            os.write(writer, json.dumps(function()).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(said) if said else {"ended": status}
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("plays", nargs="+")
    chosen = options.parse_args()
    model.write(chosen.folder)
    imported()
    right = forked(lambda: play(chosen.folder, "off/overlap/none", None))["right"]
    for spelled in chosen.plays:
        found = forked(lambda spelled=spelled: play(chosen.folder, spelled, right))  # type: ignore[misc]
        print(json.dumps({"play": spelled, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
