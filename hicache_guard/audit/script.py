"""A plan as a program of its own: what a fault comes down to, to be run against any server."""

from __future__ import annotations

import json

from hicache_guard.audit.plan import Plan

_PROGRAM = '''\
"""{title}

Found by `hicache-guard audit`. Run: python {name} [URL]; needs `requests`. It asks what the
audit asked, in a part of the cache of its own, then has each answer read again cold, and prints by
how much the log-probabilities differ. Exit status 1 where one differs by more than {limit:.3g}.
"""

import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import requests

URL = sys.argv[1] if len(sys.argv) > 1 else {url!r}
LIMIT = {limit!r}
#: Steps of requests that run together: name, token ids, tokens to generate, and more.
STEPS = {steps}


def generate(space, ids, tokens, **more):
    if "session" in more:
        more["session_params"] = {{"id": f"{{space}}-{{more['session']}}"}}
        if more["carried"] and not more["streaming"]:
            more["session_params"]["rid"] = f"{{space}}-{{more['after']}}"
    wanted = {{
        "input_ids": ids[more.get("carried", 0):],
        "session_params": more.get("session_params"),
        "sampling_params": {{"temperature": more.get("temperature", 0), "max_new_tokens": tokens,
                            "ignore_eos": more.get("ignore_eos", True)}},
        "return_logprob": True,
        "logprob_start_len": more.get("start", -1),
        "extra_key": space,
        "stream": "leave" in more,
        "rid": f"{{space}}-{{more.get('name', uuid.uuid4().hex)}}",
    }}
    answer = requests.post(URL + "/generate", json=wanted, timeout=300, stream="leave" in more)
    if "leave" not in more:
        answer.raise_for_status()
        return answer.json()["meta_info"]
    for count, _ in enumerate(line for line in answer.iter_lines() if line):
        if count >= more["leaves"]:
            if more["leave"] == "abort":
                requests.post(URL + "/abort_request", json={{"rid": wanted["rid"]}}, timeout=30)
            break
    answer.close()
    return None


def session(space, ask, what):
    wanted = {{"session_id": f"{{space}}-{{ask['session']}}"}}
    if what == "open":
        wanted |= {{"capacity_of_str_len": 1 << 20, "streaming": ask["streaming"], "timeout": 300}}
    requests.post(f"{{URL}}/{{what}}_session", json=wanted, timeout=30).raise_for_status()


def main():
    space, answers, done, opened, worst = uuid.uuid4().hex, {{}}, [], [], 0.0
    with ThreadPoolExecutor(16) as pool:
        for step in STEPS:
            asked = []
            for ask in step:
                more = dict(ask)
                history = answers.get(more.get("after"), [])
                more["ids"] = history + more["ids"]
                if "session" in more:
                    more["carried"] = len(history)
                    if not history and more["session"] not in opened:
                        opened.append(more["session"])
                        session(space, more, "open")
                asked.append((more, pool.submit(generate, space, **more)))
            for ask, future in asked:
                meta = future.result()
                if meta:
                    rows = meta["output_token_logprobs"]
                    answers[ask["name"]] = ask["ids"] + [row[1] for row in rows]
                    done.append((ask, rows, meta.get("cached_tokens")))
    for name in opened:
        session(space, {{"session": name}}, "close")
    for ask, rows, cached in done:
        cold = generate(uuid.uuid4().hex, answers[ask["name"]], 1, start=len(ask["ids"]) - 1)
        cold = cold["input_token_logprobs"][-len(rows):]
        apart = max(abs(ours[0] - theirs[0]) for ours, theirs in zip(rows, cold))
        worst = max(worst, apart)
        print(f"{{ask['name']}}: {{len(ask['ids'])}} tokens, {{cached}} cached, {{apart:.3g}}")
    print(f"at most {{worst:.3g}}; rounding explains {{LIMIT:.3g}}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
'''


def program(plan: Plan, *, name: str, url: str, limit: float, title: str) -> str:
    """The text of a Python program that plays ``plan`` and compares."""
    rows = []
    for step in plan.steps:
        rows.append("    [")
        for ask in step:
            told: dict[str, object] = {"name": ask.name, "ids": list(ask.prompt)}
            told["tokens"] = ask.tokens
            if ask.after:
                told["after"] = ask.after
            if ask.session is not None:
                told |= {"session": ask.session.name, "streaming": ask.session.streaming}
            if ask.leave is not None:
                told |= {"leave": ask.leave.value, "leaves": ask.leaves}
            if ask.temperature:
                told["temperature"] = ask.temperature
            if not ask.ignore_eos:
                told["ignore_eos"] = False
            rows.append(f"        {told!r},")
        rows.append("    ],")
    steps = "[\n" + "\n".join(rows) + "\n]"
    title = json.dumps(title)[1:-1].replace('"""', "'''")
    return _PROGRAM.format(title=title, name=name, url=url, limit=limit, steps=steps)
