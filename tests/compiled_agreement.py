"""Both implementations of the books, asked and written to in random states; and changes of the C.

As a program: compiles ``_bulk.c`` with one line changed, a child process for each change, and
prints one JSON line for each: name, whether the two implementations still agree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hicache_guard.core import compiled
from hicache_guard.core.compiled import CompiledLedger, CompiledMap
from hicache_guard.core.gathered import Gathered
from hicache_guard.core.journal import Operation
from hicache_guard.core.ledger import FREED, PageLedger, Releases
from hicache_guard.core.undo import UndoLogs
from hicache_guard.core.windowmap import WindowMap

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "_bulk.c"
PAGES = 10
SIZES = (1, 3, 4, 64)
#: A slot that no pool has; as int32 and as int64.
HOSTILE = {torch.int32: (-(2**31), -5, -1, 2**31 - 1), torch.int64: (-(2**62), -1, 2**33, 2**62)}


class Pair:
    """One pair of pools in the books of both implementations, in one random state."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.size = dice.choice(SIZES)
        self.slots = (PAGES + 1) * self.size
        self.mapping = torch.zeros(self.slots + 1, dtype=torch.int64)
        self.mapping[-1] = -1
        self.undo = (UndoLogs(), UndoLogs())
        device = torch.device("cpu")
        kinds = ((PageLedger, WindowMap), (CompiledLedger, CompiledMap))
        self.books = []
        for (ledger, book), undo in zip(kinds, self.undo, strict=True):
            full = ledger("full", PAGES, self.size, device, undo)
            window = ledger("window", PAGES, self.size, device, undo)
            self.books.append((full, window, book(self.mapping, full, window, undo)))
        self._fill()

    def _fill(self) -> None:
        """Most full pages are live and mapped, page by page; some things are not as they should."""
        dice = self.dice
        window = dice.sample(range(1, PAGES + 1), PAGES)
        for full, peer in zip(range(1, PAGES + 1), window, strict=True):
            serial = dice.randint(1, 9)
            live = dice.random() < 0.85
            for own, other, _ in self.books:
                own.born[full] = serial if live else FREED | serial
                other.born[peer] = serial if live else FREED | serial
            if not live:
                continue
            rows = torch.arange(full * self.size, (full + 1) * self.size)
            self.mapping[rows] = torch.arange(peer * self.size, (peer + 1) * self.size)
            for _, _, book in self.books:
                book.stamp[rows] = serial
                book.owner[self.mapping[rows]] = rows.int()
        for _ in range(dice.choice((0, 0, 1, 3))):
            self._spoil()

    def _spoil(self) -> None:
        dice = self.dice
        page, slot, value = dice.randint(0, PAGES), dice.randrange(self.slots), dice.randint(0, 12)
        what = dice.randrange(7)
        for full, window, book in self.books:
            if what == 0:
                full.born[page] = value
            elif what == 1:
                window.born[page] = FREED | value
            elif what == 2:
                window.born[page] = value
            elif what == 3:
                book.stamp[slot] = value
            elif what == 4:
                book.owner[slot] = value
            elif what == 5:
                full.born[page] = FREED | value
            else:
                self.mapping[slot] = 0

    def some(self, rows: list[int], *, wild: float = 0.04) -> torch.Tensor:
        """``rows`` as a note may hold them: of either type, perhaps strided, perhaps hostile."""
        dice = self.dice
        dtype = dice.choice((torch.int32, torch.int64))
        rows = [dice.choice(HOSTILE[dtype]) if dice.random() < wild else row for row in rows]
        found = torch.tensor(rows, dtype=dtype)
        return found.repeat_interleave(2)[::2] if dice.random() < 0.2 else found

    def operations(self, count: int) -> list[Operation]:
        code = sys._getframe().f_code
        return [Operation(self.dice.randint(1, 20), "x", None, code, 1) for _ in range(count)]

    def split(self, rows: list[int]) -> list[list[int]]:
        """``rows`` in one to three parts, none of them empty."""
        cuts = sorted(self.dice.randint(1, len(rows)) for _ in range(self.dice.randint(0, 2)))
        bounds = [0, *cuts, len(rows)]
        return [rows[a:b] for a, b in pairwise(bounds) if a < b]

    def pages(self) -> list[int]:
        """A few different full pages, now and then one of them again, or page 0."""
        dice = self.dice
        pages = dice.sample(range(1, PAGES + 1), dice.randint(1, PAGES))
        if dice.random() < 0.2:
            pages.append(dice.choice([0, *pages]))
        return pages

    def entries(self, rows: list[int]) -> list[int]:
        return self.mapping[torch.tensor(rows).clamp(0, self.slots - 1)].tolist()


def disagreement(seed: int) -> str | None:
    """What the two implementations do not agree on in one random state, or None."""
    pair = Pair(random.Random(seed))
    releases = (_questions_of_releases,) * 3  # claims of one must not matter to the next
    for check in (_questions_of_entries, _question_of_peers, *releases, _writes):
        answers = check(pair)
        if answers is not None:
            return f"{check.__name__}, page size {pair.size}: {answers}"
    return None


def _asked(pair: Pair, ask: Any) -> Any:
    torchs, compileds = (ask(*books) for books in pair.books)
    both = [bool(answer) for answer in (torchs, compileds)]
    return both if both[0] != both[1] else None


def _questions_of_entries(pair: Pair) -> Any:
    dice, size = pair.dice, pair.size
    rows = [page * size + dice.randrange(size) for page in pair.pages()]
    parts = pair.split(rows)
    tensors = [pair.some(part) for part in parts]
    entries = [pair.some(pair.entries(part), wild=0.02) for part in parts]
    lengths = [pair.some([dice.randint(0, 2 * size) for _ in part], wild=0) for part in parts]
    empty, back = dice.random() < 0.5, dice.randint(0, 1)
    questions = {
        "any_wrong_entry": lambda full, window, book: book.any_wrong_entry(
            Gathered(tensors), Gathered(entries), some_empty=empty
        ),
        "any_not_continued": lambda full, window, book: book.any_not_continued(
            Gathered(tensors), Gathered(entries), Gathered(lengths), back=back
        ),
    }
    for name, ask in questions.items():
        answers = _asked(pair, ask)
        if answers is not None:
            return name, answers
    return None


def _question_of_peers(pair: Pair) -> Any:
    """Of some pages all entries are empty, but perhaps one."""
    dice, size = pair.dice, pair.size
    kept = pair.mapping.clone()
    pages = pair.pages()
    for page in pages:
        pair.mapping[page * size : (page + 1) * size] = 0
    if dice.random() < 0.5:
        pair.mapping[dice.choice(pages) * size + dice.randrange(size)] = 5
    parts = pair.split([page * size + dice.randrange(size) for page in pages])
    named = [pair.some(part, wild=0.02) for part in parts]
    answers = _asked(pair, lambda full, window, book: book.any_mapped(Gathered(named)))
    pair.mapping.copy_(kept)
    return answers


def _questions_of_releases(pair: Pair) -> Any:
    dice, size = pair.dice, pair.size
    pages = pair.pages()
    third = dice.choice(([], pages[len(pages) // 2 :]))
    freed = pages[: len(pages) - len(third)]
    came = dice.sample(freed, dice.randint(0, len(freed)))
    vouched = dice.choice(([], [dice.randint(1, PAGES)]))
    came += [page for page in vouched if dice.random() < 0.7]
    if dice.random() < 0.1:
        came.append(dice.randint(0, PAGES + 1))
    direct = dice.choice(([], [dice.randint(1, PAGES)]))

    def heads(pages: list[int]) -> list[Gathered]:
        if not pages:
            return []
        return [Gathered([pair.some([page * size for page in part]) for part in pair.split(pages)])]

    def ids(pages: list[int]) -> list[Gathered]:
        if not pages:
            return []
        return [Gathered([torch.tensor(part) for part in pair.split(pages)], are_pages=True)]

    made = [heads(freed), heads(third), ids(came), ids(vouched), ids(direct) or heads(direct)]
    vet, empty = dice.random() < 0.5, dice.random() < 0.5
    side = dice.randint(0, 1)

    def ask(*books: Any) -> Any:
        backed, queued, came, vouched, direct = [
            [Gathered(one.tensors, are_pages=one.are_pages) for one in named] for named in made
        ]
        due = Releases(direct=direct, backed=backed, queued=queued, came=came, vouched=vouched)
        return books[side].any_wrong_release(due, vet_freed=vet, some_empty=empty)

    return _asked(pair, ask)


def _writes(pair: Pair) -> Any:
    dice, size = pair.dice, pair.size
    first = dice.randint(0, PAGES * size)
    rows = [row % pair.slots for row in range(first, first + dice.randint(1, 2 * size + 2))]
    targets = [dice.randrange(pair.slots) for _ in rows]
    parts = pair.split(rows)
    tensors = [pair.some(part) for part in parts]
    windows = [pair.some(targets[: len(part)]) for part in parts]
    operations = pair.operations(len(parts))
    logged = dice.random() < 0.2
    made = []
    for (full, window, book), undo in zip(pair.books, pair.undo, strict=True):
        log = undo.open() if logged else None
        named = Gathered(tensors, operations)
        book.record_named(named, Gathered(windows, operations))
        pages = [full.hand_out_slots(named), window.release_named(Gathered(windows, operations))]
        as_pages = Gathered(tensors, operations, are_pages=True)
        pages.append(window.release_named(as_pages))
        state = [full.born, window.born, book.stamp, book.owner]
        if log is not None:
            log.roll_back()
        made.append([kept.tolist() for kept in pages + state])
    return None if made[0] == made[1] else made


#: A line of the extension, and what takes one of its checks away.
CHANGES = {
    "window generation": ("(stamp >= far) & ", ""),
    "full generation": ("((stamp >= born) | (born >= FREED))", "1"),
    "freed full page": ("(stamp >= born) | (born >= FREED)", "stamp >= born"),
    "owner": ("(book->owner.at[slot] == (int32_t)row)", "1"),
    "row beyond": ("row > book.stamp.count - 2 || ", ""),
    "empty entry": ("wrong |= !some_empty;", ";"),
    "page is full": ("!inside_page(item(length, k), book.by) || ", ""),
    "nothing continued": (" || row < back)", ")"),
    "one before": ("clamp(row - back,", "clamp(row,"),
    "peers": ("row < first + by.size", "row < first + 1"),
    "dead": ("wrong |= born.at[page] >= FREED;", ";"),
    "padding comes": ("wrong |= padding < 0;", ";"),
    "forbidden": ("(bits & (int32_t)forbidden) | ", ""),
    "required": (" | (~bits & (int32_t)required)", ""),
    "claims of before": ("(held & ~7) == (int32_t)base ? held & 7 : 0", "held & 7"),
    "begun": ("inside_page(slot, by) ? outside : page_of(slot, by, outside)",
              "page_of(slot, by, outside)"),
    "outside stays free": ("    born.at[outside] = FREED;\n", ""),
    "freed mark": ("= FREED | part->serial;", "= part->serial;"),
    "serial of its part": ("stamp.at[full] = row->serial;", "stamp.at[full] = 1;"),
    "owner written": ("(int32_t)full;", "0;"),
    "int32": ("part->wide ? ((const int64_t *)part->at)[k] : ((const int32_t *)part->at)[k]",
              "((const int32_t *)part->at)[k]"),
    "strided": ("fits = is_true(PyObject_CallMethodNoArgs(tensor, name_is_contiguous));", ";"),
    "shift": ("by.shift >= 0 ? slot >> by.shift : slot / by.size", "slot >> by.shift"),
}  # fmt: skip

SEEDS = range(1500)


def _build(source: str, folder: Path) -> ModuleType:
    file = folder / "_bulk.c"
    file.write_text(source)
    library = folder / "_bulk.so"
    include = sysconfig.get_paths()["include"]
    command = ["cc", "-std=c11", "-O1", "-fPIC", "-shared", f"-I{include}", str(file), "-o"]
    subprocess.run([*command, str(library)], check=True, capture_output=True, text=True)
    spec = importlib.util.spec_from_file_location("_bulk", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(
        torch.int32, torch.int64, lambda items: items.to("cpu", torch.int64).contiguous()
    )
    return module


def agrees(source: str) -> bool:
    """Whether an extension built from ``source`` agrees; one that crashes or hangs does not."""
    with tempfile.TemporaryDirectory() as folder:
        module = _build(source, Path(folder))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(20)
                compiled._bulk = module
                status = int(any(disagreement(seed) for seed in SEEDS))
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1] == 0


def main() -> None:
    torch.set_num_threads(1)
    source = SOURCE.read_text()
    print(json.dumps(["unchanged", agrees(source)]), flush=True)
    for name, (whole, changed) in CHANGES.items():
        assert source.count(whole) == 1, f"{name}: the line is not there once"
        print(json.dumps([name, agrees(source.replace(whole, changed))]), flush=True)


if __name__ == "__main__":
    main()
