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


def engine(folder: Path, *, overlap: bool, **more: Any) -> Any:
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
        **more,
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
    groups = [[(first, 20), (first[: CHUNK * 3 - 6] + dice.choices(WORDS, k=5), 50)], [(long, 20)]]
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


async def _generated(server: Any, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    """An answer; where there is none, why."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    found: dict[str, Any]
    try:
        found = await server.async_generate(input_ids=prompt, sampling_params=sampling, **more)
    except Exception as error:
        return {"error": str(error)}
    return found


def together(server: Any) -> list[dict[str, Any]]:
    """Every request, group by group. The name of the first begins all other names."""

    async def all_of_them() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for group in requests():
            names = ("1" * (len(answers) + place) for place in range(1, len(group) + 1))
            asked = zip(group, names, _asks(group), strict=True)
            answers += await asyncio.gather(
                *(_generated(server, *one, rid=name, **more) for one, name, more in asked)
            )
        return answers

    found: list[dict[str, Any]] = server.loop.run_until_complete(all_of_them())
    return found


def _asks(group: list[Asked]) -> list[dict[str, Any]]:
    """What each of a group asks besides: the first for the log-probabilities of its tokens."""
    return [{"return_logprob": place == 0} for place in range(len(group))]


def alone(server: Any) -> list[dict[str, Any]]:
    """Every request for itself, with an empty cache."""
    found = []
    groups = requests()
    more = itertools.chain.from_iterable(map(_asks, groups))
    for one, asks in zip(itertools.chain.from_iterable(groups), more, strict=True):
        _flushed(server)
        found.append(server.loop.run_until_complete(_generated(server, *one, **asks)))
        assert found[-1]["meta_info"]["cached_tokens"] == 0, "the cache was not empty"
    return found


def _flushed(server: Any) -> None:
    while not server.flush_cache().success:  # the last one is not quite over
        time.sleep(0.01)


def conversation(server: Any) -> dict[str, Any]:
    """The turns of a streaming session: which were answered amiss, as the same text is alone."""
    dice = random.Random(1)
    text: list[int] = []
    turns: list[tuple[list[int], list[int]]] = []
    session = server.open_session(10_000, streaming=True)
    last = None
    for size in (CHUNK + 20, CHUNK * 4, 20):
        prompt = dice.choices(WORDS, k=size)
        asked = {"id": session, "rid": last, "offset": None, "replace": False}
        answer = _generated(server, prompt, 20, session_params=asked)
        found = server.loop.run_until_complete(answer)
        last = found["meta_info"]["id"]
        turns.append((text := text + prompt, found["output_ids"]))
        text = text + found["output_ids"]
    server.close_session(session)
    apart = []
    for number, (whole, answered) in enumerate(turns):
        _flushed(server)
        found = server.loop.run_until_complete(_generated(server, whole, 20))
        if found["output_ids"] != answered:
            apart.append(number)
    return {"apart": apart}


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """What of an answer is compared: its tokens and their log-probabilities; or the error."""
    if "error" in answer:
        return answer
    told = answer["meta_info"].get("output_token_logprobs") or []
    # The sums of a batch are made in another order than those of a request alone.
    return {"tokens": answer["output_ids"], "logs": [round(value, 4) for value, *_ in told]}


def _apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers are not the same."""
    if one.get("tokens") != other["tokens"] or len(one["logs"]) != len(other["logs"]):
        return True
    return any(abs(a - b) > 0.05 for a, b in zip(one["logs"], other["logs"], strict=True))


def play(folder: Path, spelled: str, right: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What was answered amiss in a play; without ``right`` answers, what is answered alone."""
    mode, way, fault = spelled.split("/")
    os.environ |= {"HICACHE_GUARD": mode, "ENGINE_FAULT": fault.replace("none", "")}
    # Where a fault is not contained, or is one to the tree, its own check ends the server when it
    # is idle, and nothing would be answered.
    contained = mode == "enforce" and fault not in ("chunk", "shared", "retracted")
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = str(contained)
    more = {"enable_streaming_session": True} if fault == "session" else {}
    server = engine(folder, overlap=way == "overlap", **more)
    if fault == "session":
        said = conversation(server)
    elif right is None:
        said = {"right": [_told(answer) for answer in alone(server)]}
    else:
        answers = together(server)
        told = [_told(answer) for answer in answers]
        cached = [
            answer["meta_info"].get("cached_tokens", 0)
            for answer in answers
            if "error" not in answer
        ]
        said = {
            "apart": [number for number, one in enumerate(told) if _apart(one, right[number])],
            "errors": [one["error"] for one in told if "error" in one],
            "hits": sum(count > 0 for count in cached),
        }
    found = server.get_server_info()["internal_states"][0]["engine"]
    server.shutdown()
    return {**said, **found}


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
