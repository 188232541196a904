"""Edits and locators on small modules of our own: exact, marked, and undone to the byte."""

from __future__ import annotations

import ast
import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_guard.patches.anchors import Find, Misfit
from hicache_guard.patches.edits import AddImport, Decorate, Edit, Insert, Replace, marked
from hicache_guard.patches.fingerprint import fingerprint, symbols

SOURCE = '''"""A module."""

from __future__ import annotations

import os  # a comment


class Pool:
    """Holds slots."""

    limit = 4

    def take(self, count, *, spare=0):
        """Take some."""
        # why it may be empty
        if count == 0:
            return None   # trailing

        elif count == self.limit:
            return self.rest(
                count,  # inner
                spare,
            )
        self.taken = count
        for slot in range(count):
            if slot:
                return slot
        self.taken = (count +
                      spare)
        return self.rest(count, spare)

    def drop(self): pass

    def rest(self, *slots):
        self.last = slots
        # the end


@property
def alone(x):
    \tx = 1; y = 2
    \treturn x
'''

TAKE = "Pool.take"

EDITS: list[tuple[str, Edit]] = [
    (TAKE, Insert("self.seen = True", "start")),
    ("Pool.rest", Insert("if slots:\n    self.seen = True\nself.more = 1", "end")),
    (TAKE, Insert("self.hit()", "before", Find("return", inside=Find("if", test="count == 0")))),
    (TAKE, Insert("self.hit()", "after", Find("assign", target="self.taken", first=True))),
    (TAKE, Insert("self.hit()", "before", Find("assign", target="self.taken", times=2))),
    (TAKE, Insert("self.hit()", "before", Find("return", value="self.rest(__a, __b)", times=2))),
    (TAKE, Insert("self.hit()", "before", Find("return", inside=Find("for", value="range(__)")))),
    (TAKE, AddImport("from ours import guarded")),
    ("class Pool", Decorate("guarded(strict=True)")),
    ("Pool.drop", Decorate("guarded")),
    ("alone", Decorate("guarded")),
    (TAKE, Replace("range(__n)", "ours(range, __n)")),
    (TAKE, Replace("__a == 0", "not __a")),
    (TAKE, Replace("count == self.limit", "same(__all)")),
    (TAKE, Replace("count + spare", "add(__all, kind='tail')")),
]


def _apply(text: str, name: str, edit: Edit) -> str:
    return edit.apply(text, name, "some-patch")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize(("name", "edit"), EDITS)
def test_edit_keeps_every_other_line_and_undoes_to_the_byte(
    name: str, edit: Edit, newline: str, ending: str
) -> None:
    """Lines are compared by difflib. Mutation seen: ``undo`` that removes one statement less, and a
    marker that is not written, fail this."""
    text = (SOURCE.rstrip("\n") + ending).replace("\n", newline)
    patched = _apply(text, name, edit)
    ast.parse(patched)
    assert marked(patched) == {"some-patch"}
    assert patched.count("\r\n") == (patched.count("\n") if newline == "\r\n" else 0)
    assert patched.endswith(newline) == bool(ending)
    lost = [
        line
        for line in difflib.ndiff(text.split("\n"), patched.split("\n"))
        if line.startswith("- ")
    ]
    # a replaced expression may lie on two lines, and a last line may gain its end
    assert len(lost) <= (2 if isinstance(edit, Replace) else 0) + (not ending)
    assert edit.undo(patched, name, "some-patch") == text


@pytest.mark.parametrize("order", [(0, 2, 7, 8), (8, 7, 2, 0), (4, 11, 12), (12, 4, 11), (13, 14)])
def test_several_edits_undo_in_reverse(order: tuple[int, ...]) -> None:
    text = SOURCE
    for place in order:
        text = EDITS[place][1].apply(text, EDITS[place][0], f"patch-{place}")
    for place in reversed(order):
        text = EDITS[place][1].undo(text, EDITS[place][0], f"patch-{place}")
    assert text == SOURCE


def test_inserted_code_runs_where_it_was_put() -> None:
    """The result is executed: what happens is the oracle, not our own reading of the tree."""
    text = _apply(SOURCE.partition("@property")[0], *EDITS[2])
    scope: dict[str, object] = {}
    exec(text.replace("self.hit()", "HITS.append(count)"), scope)
    hits: list[int] = []
    scope["HITS"] = hits
    pool = scope["Pool"]()  # type: ignore[operator]
    assert pool.take(0) is None
    assert hits == [0]
    assert pool.take(4) is None
    assert hits == [0]


def test_wrapped_call_runs() -> None:
    text = _apply(SOURCE.partition("@property")[0], TAKE, Replace("range", "ours(__all)"))
    seen: list[int] = []

    def ours(function: type[range]) -> object:
        def call(count: int) -> range:
            seen.append(count)
            return function(count)

        return call

    scope: dict[str, object] = {"ours": ours}
    exec(text, scope)
    assert scope["Pool"]().take(3) == 1  # type: ignore[operator]
    assert seen == [3]


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        (TAKE, Insert("x", "before", Find("return")), "4 times, not 1"),
        (TAKE, Insert("x", "before", Find("raise")), "0 times"),
        (TAKE, Insert("x", "before", Find("return", inside=Find("if", test="count == 1"))), "0"),
        # an elif is a branch of its own: its body is not inside the first test
        (TAKE, Insert("x", "before", Find("return", inside=Find("if", test="count == 9"))), "0"),
        (TAKE, Insert("x", "end"), "ends by leaving"),
        ("Pool.drop", Insert("x", "end"), "one line"),
        ("alone", Insert("x", "before", Find("assign", target="y")), "shares its line"),
        ("Pool.gone", Insert("x", "end"), "defined 0 times"),
        ("Pool", Insert("x", "end"), "not a function"),
        (TAKE, Replace("self.rest", "x"), "2 times, not once"),
        ("alone", Replace("2", "3"), "shares its line"),
        (TAKE, Replace("self.gone", "x"), "0 times"),
    ],
)
def test_what_does_not_match_exactly_is_refused(name: str, edit: Edit, says: str) -> None:
    """Mutation seen: ``locate`` that takes the first of several matches fails this."""
    with pytest.raises(Misfit, match=says):
        _apply(SOURCE, name, edit)


def test_symbol_defined_twice_is_refused() -> None:
    text = SOURCE + "\n\nclass Pool:\n    def take(self):\n        self.x = 1\n"
    with pytest.raises(Misfit, match="2 times"):
        _apply(text, TAKE, Insert("x", "start"))


@pytest.mark.parametrize(("name", "edit"), [EDITS[0], EDITS[1], EDITS[2], EDITS[8], EDITS[11]])
def test_what_was_changed_by_hand_is_not_taken_out(name: str, edit: Edit) -> None:
    """Mutation seen: ``undo`` that trusts the comment alone fails this."""
    patched = _apply(SOURCE, name, edit)
    for ours in ("self.seen = True", "self.hit()", "guarded(strict=True)", "ours(range"):
        patched = patched.replace(ours, ours.replace("s", "z"))
    with pytest.raises(Misfit, match="changed by hand"):
        edit.undo(patched, name, "some-patch")


def test_undo_leaves_later_changes_alone() -> None:
    text = _apply(_apply(SOURCE, *EDITS[0]), *EDITS[8])
    changed = text.replace("limit = 4", "limit = 5  # more").replace("# the end", "# an end")
    back = EDITS[0][1].undo(
        EDITS[8][1].undo(changed, "class Pool", "some-patch"), TAKE, "some-patch"
    )
    assert back == SOURCE.replace("limit = 4", "limit = 5  # more").replace("# the end", "# an end")


def test_import_that_is_there_is_not_added_twice() -> None:
    text = _apply(SOURCE, TAKE, AddImport("import os"))
    assert text == SOURCE


def _print_of(text: str, name: str) -> str:
    (node,) = (node for found, node in symbols(ast.parse(text)) if found == name)
    return fingerprint(node)


def test_fingerprint_ignores_formatting_and_nothing_else() -> None:
    """Mutations seen: a fingerprint that keeps docstrings, and one that drops the names of fields
    and so takes ``x[1:]`` for ``x[:1]``, fail this."""
    same = (
        SOURCE.replace('"""Take some."""\n', '"""Other words."""\n\n\n')
        .replace("        # why it may be empty\n", "")
        .replace("(count +\n                      spare)", "count + spare")
        .replace("if count == 0:", "if (count  ==  0):  # zero")
    )
    assert same != SOURCE
    assert _print_of(same, TAKE) == _print_of(SOURCE, TAKE)
    assert _print_of(same, "Pool") == _print_of(SOURCE, "Pool")
    for old, new in [
        ("count == 0", "count == 1"),
        ("count == 0", "count == 0.0"),
        ("count == 0", "count is 0"),
        ("self.taken = count", "self.taken = spare"),
        ("spare=0", "spare=1"),
        ("spare=0", "extra=0"),
        ("return slot", "yield slot"),
        ("def take", "async def take"),
        ("return None", "return"),
    ]:
        assert _print_of(SOURCE.replace(old, new), "Pool") != _print_of(SOURCE, "Pool"), new
    ends = (f"def f(x):\n    return x[{part}]\n" for part in ("1:", ":1"))
    assert len({_print_of(text, "f") for text in ends}) == 2
    header = _print_of(SOURCE, "class Pool")
    assert _print_of(SOURCE.replace("limit = 4", "limit = 5"), "class Pool") == header
    assert _print_of(SOURCE.replace("class Pool:", "class Pool(Base):"), "class Pool") != header


_LINES = st.lists(
    st.sampled_from(
        [
            "x = 1", "self.taken = x", "if x == 0:\n    return x", "# a comment", "", "   ",
            "while x:\n    x -= 1\nelse:\n    return 2",
            "try:\n    self.f(x)\nexcept ValueError:\n    raise\nfinally:\n    pass",
            "with self.lock, open(x) as y:\n    return {\n  'a': y,\n      }",
            "y = '''\n  text\n\t'''", "def inner():\n    return x", "x = (\n1,\n  2 )",
        ]
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    lines=_LINES,
    indent=st.sampled_from(["    ", "\t", "  "]),
    newline=st.sampled_from(["\n", "\r\n"]),
    final=st.booleans(),
    place=st.integers(0, len(EDITS) - 1),
)
def test_any_body_is_restored_or_refused(
    lines: list[str], indent: str, newline: str, final: bool, place: int
) -> None:
    body = "\n".join(lines).replace("    ", indent).split("\n")
    inner = "\n".join(indent * 2 + line if line.strip() else line for line in ["x = 0", *body])
    text = f"import os\n\n\nclass Pool:\n{indent}def take(self, x):\n{inner}"
    text = (text.rstrip() + ("\n" if final else "")).replace("\n", newline)
    try:
        ast.parse(text)
    except SyntaxError:
        return
    name, edit = EDITS[place]
    try:
        patched = _apply(text, name, edit)
    except Misfit:
        return
    assert patched != text
    assert edit.undo(patched, name, "some-patch") == text
