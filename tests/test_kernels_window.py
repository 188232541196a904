"""The window kernel (interpreted) against float64, and the memory that it must not touch.

Proved by mutation: ``window_agreement.CHANGES`` names changes of one text of the kernel, and with
each the same comparison must fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import window_agreement as agreement
from interpreted import rows_of


def _disagreeing(*options: str) -> tuple[int, list[Any]]:
    rows = rows_of("window_agreement.py", *options)
    return len(rows), [row for row in rows if row[1] is not None]


def test_triton_agrees_with_float64_and_touches_nothing_stale() -> None:
    count, wrong = _disagreeing()
    assert count == len(agreement.CASES) + len(agreement.GUARDED)
    assert wrong == []


@pytest.mark.slow
def test_triton_agrees_in_every_triple_of_values() -> None:
    assert _disagreeing("--slow")[1] == []


@pytest.mark.slow
def test_agreement_notices_each_change() -> None:
    rows = dict(rows_of("window_agreement.py", "--changes"))
    assert rows.pop("unchanged") is True
    assert len(rows) == len(agreement.CHANGES)
    assert [name for name, agrees in rows.items() if agrees] == [], "changes that nothing notices"


def test_every_value_and_every_pair_is_among_the_cases() -> None:
    names = [name for name in agreement.VALUES if name != "batch"]
    met = {
        (one, repr(getattr(case, one)), other, repr(getattr(case, other)))
        for case in agreement.CASES
        for one, other in itertools.combinations(names, 2)
    }
    for one, other in itertools.combinations(names, 2):
        for value, beside in itertools.product(agreement.VALUES[one], agreement.VALUES[other]):
            assert (one, repr(value), other, repr(beside)) in met
    assert {case.batch for case in agreement.CASES} == {"empty", "single", "ragged"}


def _asked(**terms: Any) -> agreement.Asked:
    return agreement.asked(agreement.Case(**terms))


def test_the_reference_is_plain_attention_where_nothing_is_stale() -> None:
    """Against torch's own, with the whole sequence in the window and no sink."""
    these = _asked(batch="single", window=300, queries="tree", stale=0.0, poison=0.0)
    out, lse = agreement.reference(these, these.v)
    slots = these.table.slots
    count, heads = these.q.shape[:2]
    k, v = (kept[slots].double().repeat_interleave(4, 1).transpose(0, 1) for kept in
            (these.k, these.v))  # fmt: skip
    length, start = int(these.lengths[0]), int(these.table.starts[0])
    seen = torch.arange(start, length)
    at = length - count + torch.arange(count)
    mask = (seen[None] <= at[:, None]) & (seen[None] > at[:, None] - 300)
    q = these.q.double().transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(out.transpose(0, 1), wanted)
    scores = (q @ k.transpose(1, 2) * 64**-0.5).masked_fill(~mask, -math.inf)
    assert torch.allclose(lse, scores.logsumexp(2).transpose(0, 1))
    assert lse.shape == (count, heads)


def test_the_reference_knows_nothing_and_sinks() -> None:
    these = _asked(stale=1.0, sinks=True)
    out, lse = agreement.reference(these, these.v)
    assert not out.any()
    assert torch.equal(lse, these.terms["sinks"].double().expand_as(lse))
    these.terms["sinks"] = None
    out, lse = agreement.reference(these, these.v)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_arguments_that_cannot_be_are_refused() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from hicache_guard.kernels.window_triton import attend

    these = _asked()
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"k": these.k.half()}, TypeError),
        ({"q": these.q[:, 1:]}, ValueError),
        ({"q": these.q[..., :32]}, ValueError),
        ({"v": these.v[1:]}, ValueError),
        ({"v": these.v.repeat(1, 1, 2)[..., ::2]}, ValueError),
        ({"k": these.k.repeat(2, 1, 1), "v": these.v.repeat(2, 1, 1)}, ValueError),
        ({"k": these.k[..., :24], "q": these.q[..., :24]}, ValueError),
        ({"k": these.k[..., :8], "q": these.q[..., :8]}, ValueError),
    ]
    for changes, error in wrong:
        with pytest.raises(error):
            agreement.attended(attend, dataclasses.replace(these, **changes))
