/*
 * The guard's books on a CPU: "is this plainly in order?", asked and written down in one pass.
 *
 * Where hicache_guard/core notes what an operation did and checks many notes in bulk, a loop in C
 * checks each operation at once, from the caller's own tensors, for less than keeping copies of them
 * would cost. A question that is answered with yes has been written down; after a no nothing has
 * changed, and the torch code of core/guard.py judges the operation slot by slot. What is asked is
 * defined there and in core/ledger.py and core/windowmap.py; core/compiled.py lists the questions.
 *
 * Every slot is whatever a caller handed in: it is checked or clamped against the books before it is
 * followed. No address is kept but those of the books, whose buffers are held.
 *
 * Names: "born", "claims", "named", "stamp", "owner" and "since" are the int32 books. The last page of a
 * ledger, "outside", stands for every page beyond the pool.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define FREED (INT32_C(1) << 30)
#define QUEUED (INT32_C(1) << 29)
/* What is remembered of operations: how many touches, and how many runs of pages in all of them. */
#define TOUCHES 8192
#define RUNS (INT64_C(1) << 17)

/* -- tensors ---------------------------------------------------------------------------------- */

/* What DLPack 1.3 says of a tensor in one call, if its class has a table for that (torch from 2.10); the
 * layout is that standard's. The numbers are those of the CPU and of signed integers. */
typedef struct {
    void *data;
    int32_t device, device_index, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Told;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export, *import;
    int (*tell)(void *tensor, Told *told);
} Table;

enum { ON_CPU = 1, SIGNED = 0, DLPACK = 1 };

/* Given by prepare(): torch's dtypes, and what makes any tensor one that can be read here; the class of
 * plain tensors, and what tells of these, if anything. */
static PyObject *int32_type, *int64_type, *fitted, *plain_type;
static int (*tell)(void *tensor, Told *told);
static PyObject *name_dtype, *name_is_cpu, *name_is_contiguous, *name_numel, *name_data_ptr;
static PyObject *name_device_indices, *name_device_prefix_len, *name_last_device_node;
static PyObject *name_trees_suspect, *name_compiled, *name_key;

/* prepare(int32, int64, fitted, plain, table): `table` is the class's capsule, or None. */
static PyObject *prepare(PyObject *self, PyObject *args)
{
    PyObject *narrow, *wide, *fit, *plain, *capsule;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOO", &narrow, &wide, &fit, &plain, &capsule))
        return NULL;
    tell = NULL;
    if (capsule != Py_None) {
        const Table *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        if (!table)
            return NULL;
        if (table->major == DLPACK)
            tell = table->tell;
    }
    Py_XSETREF(int32_type, Py_NewRef(narrow));
    Py_XSETREF(int64_type, Py_NewRef(wide));
    Py_XSETREF(fitted, Py_NewRef(fit));
    Py_XSETREF(plain_type, Py_NewRef(plain));
    Py_RETURN_NONE;
}

/* The items of a tensor, for the time of one call; `kept` holds it where it had to be made. */
typedef struct {
    const void *at;
    int64_t count;
    int wide; /* int64, else int32 */
    PyObject *kept;
} Items;

static int is_true(PyObject *found)
{
    int yes = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return yes;
}

static int as_int64(PyObject *found, int64_t *value)
{
    if (!found)
        return -1;
    *value = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether a tensor can be read as it lies: int32 or int64, contiguous, on the CPU; -1 for errors. */
static int readable(PyObject *tensor, int *wide)
{
    PyObject *type = PyObject_GetAttr(tensor, name_dtype);
    if (!type)
        return -1;
    *wide = type == int64_type;
    int fits = *wide || type == int32_type;
    Py_DECREF(type);
    if (fits)
        fits = is_true(PyObject_GetAttr(tensor, name_is_cpu));
    if (fits == 1)
        fits = is_true(PyObject_CallMethodNoArgs(tensor, name_is_contiguous));
    return fits;
}

/* Whether a plain tensor can be read as it lies, and was; any other is for read_items() to ask. */
static int read_told(PyObject *tensor, Items *items)
{
    Told told;
    if (!tell || (PyObject *)Py_TYPE(tensor) != plain_type)
        return 0;
    if (tell(tensor, &told)) {
        PyErr_Clear();
        return 0;
    }
    if (told.device != ON_CPU || told.dimensions != 1 || told.kind != SIGNED || told.lanes != 1 ||
        (told.bits != 32 && told.bits != 64) || (told.strides && told.strides[0] != 1))
        return 0;
    *items = (Items){(char *)told.data + told.offset, told.shape[0], told.bits == 64, Py_NewRef(tensor)};
    return 1;
}

static int read_items(PyObject *tensor, Items *items)
{
    if (read_told(tensor, items))
        return 0;
    int fits = readable(tensor, &items->wide);
    if (fits < 0)
        return -1;
    if (fits) {
        Py_INCREF(tensor);
    } else {
        if (!fitted) {
            PyErr_SetString(PyExc_RuntimeError, "prepare() was not called");
            return -1;
        }
        tensor = PyObject_CallOneArg(fitted, tensor);
        fits = tensor ? readable(tensor, &items->wide) : -1;
        if (fits < 1) {
            Py_XDECREF(tensor);
            if (!fits)
                PyErr_SetString(PyExc_TypeError, "a tensor that cannot be read");
            return -1;
        }
    }
    int64_t address;
    if (as_int64(PyObject_CallMethodNoArgs(tensor, name_numel), &items->count) < 0 ||
        as_int64(PyObject_CallMethodNoArgs(tensor, name_data_ptr), &address) < 0) {
        Py_DECREF(tensor);
        return -1;
    }
    items->at = (const void *)(intptr_t)address;
    items->kept = tensor;
    return 0;
}

static inline int64_t item(const Items *items, int64_t k)
{
    return items->wide ? ((const int64_t *)items->at)[k] : ((const int32_t *)items->at)[k];
}

#define AT_ONCE 16

/* How many items from `k` on follow each other without a gap. Free lists are mostly rows that were
 * freed as they lay, so an allocation is a few long runs. */
static int64_t run_from(const Items *items, int64_t k)
{
    int64_t first = item(items, k), count = items->count - k, run = 1;
    if (count < 2 || item(items, k + 1) - first != 1)
        return 1;
    for (; run + AT_ONCE <= count; run += AT_ONCE) {
        int64_t gaps = 0;
        for (int64_t j = 0; j < AT_ONCE; j++)
            gaps |= item(items, k + run + j) - first - (run + j);
        if (gaps)
            break;
    }
    while (run < count && item(items, k + run) - first == run)
        run++;
    return run;
}

/* -- books ------------------------------------------------------------------------------------ */

typedef struct {
    int32_t *at;
    int64_t count;
} Array;

typedef struct {
    int32_t first, last;
} Run;

typedef struct {
    int64_t start, end; /* of its runs, among all that were ever written */
    int32_t serial;
    int side, freed;
} Touch;

/* The generation of a page that a free ended. */
typedef struct {
    int side;
    int32_t page, born;
} Ended;

enum { FULL, WINDOW };
enum { BORN_FULL, BORN_WINDOW, NAMED, STAMP, OWNER, SINCE, ARRAYS };

typedef struct {
    PyObject_HEAD
    Py_buffer views[ARRAYS];
    Array array[ARRAYS];
    int64_t size;
    int shift; /* page size as a power of two; -1 for none */
    Ended *ended; /* what the last free ended, in case that it is taken back */
    int64_t ends, room;
    int32_t ended_serial;
    Touch *touches;
    int64_t touched;
    Run *runs;
    int64_t written;
    int in_tree;  /* whether a prefix tree's own method runs */
    int betrayed; /* whether somebody else freed the window side of what a tree holds */
} Books;

static int take_array(Books *self, int which, PyObject *from)
{
    Py_buffer *view = &self->views[which];
    if (PyObject_GetBuffer(from, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        return -1;
    const char *format = view->format ? view->format : "B";
    if (view->itemsize != 4 || !format[0] || format[1] || !strchr("il", format[0])) {
        PyErr_Format(PyExc_TypeError, "a book of int32 is expected, not of %s", format);
        return -1;
    }
    self->array[which].at = view->buf;
    self->array[which].count = view->len / 4;
    return 0;
}

/* Books(page_size, born_full, born_window, named, stamp, owner, since) */
static PyObject *books_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long size;
    PyObject *from[ARRAYS];
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Books takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "LOOOOOO", &size, &from[0], &from[1], &from[2], &from[3], &from[4],
                          &from[5]))
        return NULL;
    Books *self = (Books *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    for (int which = 0; which < ARRAYS; which++)
        if (take_array(self, which, from[which]) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    const Array *array = self->array;
    if (size < 1 || array[BORN_FULL].count < 2 || array[BORN_WINDOW].count < 2 ||
        array[STAMP].count < 2 || array[OWNER].count < 1 ||
        array[SINCE].count != array[BORN_FULL].count ||
        (size > 1 && array[NAMED].count != array[BORN_FULL].count)) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "Books: sizes do not fit");
        return NULL;
    }
    self->size = size;
    self->shift = -1;
    if ((size & (size - 1)) == 0)
        for (self->shift = 0; INT64_C(1) << self->shift < size;)
            self->shift++;
    self->touches = PyMem_Calloc(TOUCHES, sizeof(Touch));
    self->runs = PyMem_Malloc(RUNS * sizeof(Run));
    if (!self->touches || !self->runs) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void books_dealloc(PyObject *object)
{
    Books *self = (Books *)object;
    for (int which = 0; which < ARRAYS; which++)
        if (self->views[which].obj)
            PyBuffer_Release(&self->views[which]);
    PyMem_Free(self->ended);
    PyMem_Free(self->touches);
    PyMem_Free(self->runs);
    Py_TYPE(object)->tp_free(object);
}

static inline int64_t clamp(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value > most ? most : value;
}

/* What the loops read of the books, in the caller's own memory: stores into a book could change the
 * Books themselves for all that a compiler knows, and everything would be read anew for each slot. */
typedef struct {
    int64_t size, outside[2], stamps, owners;
    int32_t *born[2], *named, *stamp, *owner, *since;
    int shift;
} View;

static View view_of(const Books *self)
{
    const Array *array = self->array;
    return (View){
        .size = self->size,
        .outside = {array[BORN_FULL].count - 1, array[BORN_WINDOW].count - 1},
        .stamps = array[STAMP].count,
        .owners = array[OWNER].count,
        .born = {array[BORN_FULL].at, array[BORN_WINDOW].at},
        .named = array[NAMED].at,
        .stamp = array[STAMP].at,
        .owner = array[OWNER].at,
        .since = array[SINCE].at,
        .shift = self->shift,
    };
}

/* The page of a slot; 0 below the pool, `outside` beyond it. */
static inline int64_t page_of(const View *view, int64_t slot, int64_t outside)
{
    if (slot < 0)
        return 0;
    int64_t page = view->shift >= 0 ? slot >> view->shift : slot / view->size;
    return page > outside ? outside : page;
}

static inline int64_t inside_page(const View *view, int64_t slot)
{
    return view->shift >= 0 ? slot & (view->size - 1) : slot % view->size;
}

/* Room to remember `count` pages that a free ends; whatever was remembered is forgotten. */
static int make_room(Books *self, int64_t count, int32_t serial)
{
    self->ends = 0;
    self->ended_serial = serial;
    if (count <= self->room)
        return 0;
    Ended *more = PyMem_Realloc(self->ended, (size_t)count * sizeof(Ended));
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    self->ended = more;
    self->room = count;
    return 0;
}

/* Give the pages that were ended last their generations again, newest first, but those whose state
 * is no longer `mark`: these have gone on to the free list. */
static void revive(Books *self, int32_t mark)
{
    while (self->ends) {
        const Ended *was = &self->ended[--self->ends];
        int32_t *born = &self->array[BORN_FULL + was->side].at[was->page];
        if (*born == mark)
            *born = was->born;
    }
}

/* Whether the entry row -> slot is proved; both within the books, the entry not empty. */
static inline int proves(const View *view, int64_t row, int64_t slot)
{
    int32_t stamp = view->stamp[row];
    int32_t born = view->born[FULL][page_of(view, row, view->outside[FULL])];
    int32_t far = view->born[WINDOW][page_of(view, slot, view->outside[WINDOW])];
    return (stamp >= far) & ((stamp >= born) | (born >= FREED)) &
           (view->owner[slot] == (int32_t)row);
}

/* -- the journal's part ----------------------------------------------------------------------- */

/* The pages that an operation touched on one side, as they come; mostly in their order. */
typedef struct {
    Books *books;
    Run run; /* none yet where it ends before it begins */
    int64_t start;
} Touching;

static inline Touching touching(Books *self)
{
    return (Touching){self, {0, -1}, self->written};
}

static inline void end_run(Touching *now)
{
    if (now->run.last >= now->run.first)
        now->books->runs[now->books->written++ & (RUNS - 1)] = now->run;
}

static inline void touch_pages(Touching *now, int64_t first, int64_t last)
{
    if (first == (int64_t)now->run.last + 1) {
        now->run.last = (int32_t)last;
        return;
    }
    end_run(now);
    now->run = (Run){(int32_t)first, (int32_t)last};
}

/* Remember it. What is never ended leaves runs that nothing refers to. */
static void end_touch(Touching *now, int side, int freed, int32_t serial)
{
    Books *self = now->books;
    end_run(now);
    self->touches[self->touched++ % TOUCHES] =
        (Touch){now->start, self->written, serial, side, freed};
}

/* touched(side, page): [(serial, freed)] of the touches of a page that are remembered, newest first. */
static PyObject *touched(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Books *self = (Books *)object;
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "touched takes 2 arguments");
    long long side = PyLong_AsLongLong(args[0]), page = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *found = PyList_New(0);
    for (int64_t k = self->touched - 1; found && k >= 0 && k >= self->touched - TOUCHES; k--) {
        const Touch *touch = &self->touches[k % TOUCHES];
        int64_t at = self->written - RUNS;
        if (touch->side != side)
            continue;
        for (at = at > touch->start ? at : touch->start; at < touch->end; at++) {
            const Run *run = &self->runs[at & (RUNS - 1)];
            if (run->first <= page && page <= run->last) {
                PyObject *one = Py_BuildValue("(ii)", touch->serial, touch->freed);
                if (!one || PyList_Append(found, one) < 0)
                    Py_CLEAR(found);
                Py_XDECREF(one);
                break;
            }
        }
    }
    return found;
}

/* -- arguments -------------------------------------------------------------------------------- */

#define MAX_TENSORS 3
#define MAX_NUMBERS 4

typedef struct {
    Items items[MAX_TENSORS];
    int64_t number[MAX_NUMBERS];
} Arguments;

static void let_go(Arguments *read)
{
    for (int k = 0; k < MAX_TENSORS; k++)
        Py_CLEAR(read->items[k].kept);
}

/* Reads `tensors` tensors and then `numbers` numbers. */
static int read_arguments(Arguments *read, PyObject *const *args, Py_ssize_t given, int tensors,
                          int numbers)
{
    memset(read, 0, sizeof *read);
    if (given != tensors + numbers) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, found %zd", tensors + numbers, given);
        return -1;
    }
    for (int k = 0; k < tensors; k++)
        if (read_items(args[k], &read->items[k]) < 0) {
            let_go(read);
            return -1;
        }
    for (int k = 0; k < numbers; k++) {
        read->number[k] = PyLong_AsLongLong(args[tensors + k]);
        if (read->number[k] == -1 && PyErr_Occurred()) {
            let_go(read);
            return -1;
        }
    }
    return 0;
}

static PyObject *refuse(Arguments *read, const char *why)
{
    let_go(read);
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

static PyObject *answer(Arguments *read, int yes)
{
    let_go(read);
    return PyBool_FromLong(yes);
}

#define READ(tensors, numbers)                                                                     \
    Books *self = (Books *)object;                                                                 \
    Arguments read;                                                                                \
    if (read_arguments(&read, args, given, tensors, numbers) < 0)                                  \
        return NULL;

/* Another is for the torch code to judge. */
static int is_mapping(const Items *mapping)
{
    return mapping->wide && mapping->count > 1;
}

/* -- allocations ------------------------------------------------------------------------------ */

/* Start a generation of the pages that begin in `slots`. */
static void hand_out(Books *self, int side, const Items *slots, int32_t serial)
{
    const View view = view_of(self);
    const Items from = *slots;
    int32_t *born = view.born[side];
    int64_t outside = view.outside[side];
    Touching now = touching(self);
    for (int64_t k = 0; k < from.count;) {
        int64_t slot = item(&from, k), run = slot < 0 ? 1 : run_from(&from, k);
        int64_t first = page_of(&view, slot, outside), last = page_of(&view, slot + run - 1, outside);
        first += first == 0 || inside_page(&view, slot); /* page 0 is nobody's */
        last -= last == outside;
        for (int64_t page = first; page <= last; page++)
            born[page] = serial;
        if (first <= last)
            touch_pages(&now, first, last);
        k += run;
    }
    end_touch(&now, side, 0, serial);
}

/* took(full, window, serial): an allocation returned the slots `full` and mapped the last of them to
 * `window`, in their order. A new page is taken from its first slot on. */
static PyObject *took(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(2, 1)
    const Items *full = &read.items[0], *window = &read.items[1];
    int32_t serial = (int32_t)read.number[0];
    int64_t first = full->count - window->count;
    if (first < 0)
        return refuse(&read, "took: more window slots than full slots");
    const View view = view_of(self);
    const Items rows = *full, slots = *window;
    int64_t rows_left = 0, slots_left = 0; /* of the runs that are being written */
    for (int64_t k = 0, run; k < slots.count; k += run, rows_left -= run, slots_left -= run) {
        int64_t row = item(&rows, first + k), slot = item(&slots, k);
        if (!rows_left)
            rows_left = run_from(&rows, first + k);
        if (!slots_left)
            slots_left = run_from(&slots, k);
        run = rows_left < slots_left ? rows_left : slots_left;
        if (row < 0 || row > view.stamps - run || slot < 0 || slot > view.owners - run) {
            run = 1;
            row = clamp(row, view.stamps - 1);
            slot = clamp(slot, view.owners - 1);
        }
        for (int64_t j = 0; j < run; j++)
            view.stamp[row + j] = serial;
        for (int64_t j = 0; j < run; j++)
            view.owner[slot + j] = (int32_t)(row + j);
    }
    hand_out(self, FULL, full, serial);
    hand_out(self, WINDOW, window, serial);
    return answer(&read, 1);
}

/* continued(last, lengths, mapping, less): whether each request that goes on inside a page, after the
 * slot `last` (none below 0) with its length `less` `less`, has a proved entry there. */
static PyObject *continued(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(3, 1)
    const Items *last = &read.items[0], *lengths = &read.items[1], *mapping = &read.items[2];
    if (last->count != lengths->count)
        return refuse(&read, "continued: sizes do not fit");
    if (!is_mapping(mapping))
        return answer(&read, 0);
    const View view = view_of(self);
    int64_t rows = mapping->count < view.stamps ? mapping->count : view.stamps;
    uint64_t less = (uint64_t)read.number[0]; /* whose difference may wrap */
    int right = 1;
    for (int64_t k = 0; k < last->count && right; k++) {
        int64_t row = item(last, k);
        if (row < 0 || !inside_page(&view, (int64_t)((uint64_t)item(lengths, k) - less)))
            continue;
        row = clamp(row, rows - 2);
        int64_t entry = item(mapping, row);
        right = entry > 0 && entry < view.owners && proves(&view, row, entry);
    }
    return answer(&read, right);
}

/* -- frees ------------------------------------------------------------------------------------ */

enum { FREES_FULL = 1, FREES_WINDOW = 2, ALL_MAPPED = 4, PEERS_FOLLOW = 8 };

/* Whether no row of a full page has an entry; the last row stands for those beyond. */
static inline int is_unmapped(const View *view, const Items *mapping, int64_t page)
{
    for (int64_t row = page * view->size; row < (page + 1) * view->size; row++)
        if (item(mapping, clamp(row, mapping->count - 2)) > 0)
            return 0;
    return 1;
}

/* The page of a full slot that is to be freed, or 0 where it may not be. */
static inline int64_t full_page(const View *view, const Items *mapping, int64_t slot, int what)
{
    int64_t outside = view->outside[FULL], page = page_of(view, slot, outside);
    if (page == outside || view->born[FULL][page] >= FREED)
        return 0;
    if (!(what & (FREES_WINDOW | PEERS_FOLLOW)) && !is_unmapped(view, mapping, page))
        return 0;
    return page;
}

/* The window page that a full slot leads to, 0 for none, or -1 where it may not be freed. */
static inline int64_t window_page(const View *view, const Items *mapping, int64_t slot, int what)
{
    if (slot < 0 || slot > mapping->count - 2 || slot > view->stamps - 2)
        return -1;
    int64_t entry = item(mapping, slot);
    if (entry == 0)
        return what & ALL_MAPPED ? -1 : 0;
    if (entry < 0 || entry >= view->owners || !proves(view, slot, entry))
        return -1;
    return page_of(view, entry, view->outside[WINDOW]);
}

/* Whether a tree holds a full page as it took it over; page 0 and those beyond are never held. */
static inline int is_held(const View *view, int64_t page)
{
    return view->born[FULL][page] <= view->since[page];
}

/* Whether a full page is the caller's to free: what a tree holds only its own methods may. */
static inline int may_end(const Books *self, const View *view, int64_t page)
{
    return self->in_tree || !is_held(view, page);
}

/* End the generation of the pages that a free names on one side; 0 where one may not be freed. */
static int end_pages(Books *self, int side, const Items *slots, const Items *mapping, int what,
                     int32_t serial, int64_t heads)
{
    const View view = view_of(self);
    const Items from = *slots, entries = *mapping;
    int32_t *born = view.born[side], mark = FREED | QUEUED | serial;
    Ended *ended = self->ended;
    int64_t ends = self->ends;
    Touching now = touching(self);
    int right = 1, betrayed = 0;
    for (int64_t k = 0; k < heads; k++) {
        int64_t slot = item(&from, k * view.size), page;
        if (side == WINDOW) {
            page = window_page(&view, &entries, slot, what);
            right = page >= 0;
            betrayed |= right && is_held(&view, page_of(&view, slot, view.outside[FULL]));
        } else {
            page = full_page(&view, &entries, slot, what);
            right = page > 0 && may_end(self, &view, page);
        }
        if (!right)
            break;
        if (!page)
            continue;
        ended[ends++] = (Ended){side, (int32_t)page, born[page]};
        born[page] = mark;
        touch_pages(&now, page, page);
    }
    self->ends = ends;
    if (right)
        end_touch(&now, side, 1, serial);
    self->betrayed |= betrayed && right && !self->in_tree;
    return right;
}

/* freed(slots, mapping, what, serial): whether a free may be let run. `slots` are consecutive from a
 * page boundary, or of one-slot pages. `what`: 1 it frees the full side, 2 the window side through
 * the mapping, 4 every entry must lead somewhere, 8 of the full side alone: its window peers may
 * still be there. The pages are free from now on, and on their way to the free list; so a page that
 * is named twice is free already when it is named again. */
static PyObject *freed(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(2, 2)
    const Items *slots = &read.items[0], *mapping = &read.items[1];
    const View view = view_of(self);
    int what = (int)read.number[0];
    int32_t serial = (int32_t)read.number[1];
    int64_t heads = (slots->count + view.size - 1) / view.size, touched_before = self->touched;
    if (!is_mapping(mapping))
        return answer(&read, 0);
    if (make_room(self, 2 * heads, serial) < 0) {
        let_go(&read);
        return NULL;
    }
    /* The window side first: what proves an entry is that its full page is live, too. */
    int right = (!(what & FREES_WINDOW) ||
                 end_pages(self, WINDOW, slots, mapping, what, serial, heads)) &&
                (!(what & FREES_FULL) ||
                 end_pages(self, FULL, slots, mapping, what, serial, heads));
    if (!right) {
        revive(self, FREED | QUEUED | serial);
        self->touched = touched_before;
    } else if (what & FREES_FULL && view.size > 1) {
        for (int64_t k = 0; k < heads; k++) {
            int64_t slot = item(slots, k * view.size);
            int64_t reach = inside_page(&view, slot) + slots->count - k * view.size;
            view.named[page_of(&view, slot, view.outside[FULL])] = (int32_t)clamp(reach, view.size);
        }
    }
    return answer(&read, right);
}

/* take_back(serial): the free of this serial, the last that was let run, did not happen: its pages
 * live on, but those that came to the free list meanwhile. */
static PyObject *take_back(PyObject *object, PyObject *which)
{
    Books *self = (Books *)object;
    int64_t serial = PyLong_AsLongLong(which);
    if (serial == -1 && PyErr_Occurred())
        return NULL;
    if (serial == self->ended_serial)
        revive(self, FREED | QUEUED | self->ended_serial);
    Py_RETURN_NONE;
}

/* The page of what enters a free list: of a page id (`pages`) or a slot. */
static inline int64_t page_in(const View *view, int64_t named, int64_t outside, int pages)
{
    return pages ? clamp(named, outside) : page_of(view, named, outside);
}

/* came(items, side, pages): whether all that enters a free list was freed before and is on its way
 * there, each page once. `pages` for page ids, else slots. */
static PyObject *came(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(1, 2)
    const View view = view_of(self);
    const Items items = read.items[0];
    int side = read.number[0] != 0, pages = read.number[1] != 0;
    int32_t *born = view.born[side];
    int64_t outside = view.outside[side], k = 0;
    for (; k < items.count; k++) {
        int64_t page = page_in(&view, item(&items, k), outside, pages);
        if (page == 0 || page == outside || born[page] < (FREED | QUEUED))
            break;
        born[page] &= ~QUEUED;
    }
    int right = k == items.count;
    while (!right && k--)
        born[page_in(&view, item(&items, k), outside, pages)] |= QUEUED;
    return answer(&read, right);
}

/* came_alone(items, side_and_pages, serial): whether what enters a free list with no free behind it is
 * live, each page once. Side 0 or 1, and 2 for page ids. The pages are free from now on. */
static PyObject *came_alone(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(1, 2)
    const View view = view_of(self);
    const Items items = read.items[0];
    int side = read.number[0] & 1, pages = read.number[0] >> 1 & 1;
    int32_t *born = view.born[side], serial = (int32_t)read.number[1];
    int64_t outside = view.outside[side], k = 0;
    if (make_room(self, items.count, serial) < 0) {
        let_go(&read);
        return NULL;
    }
    Touching now = touching(self);
    for (; k < items.count; k++) {
        int64_t page = page_in(&view, item(&items, k), outside, pages);
        if (page == 0 || page == outside || born[page] >= FREED ||
            (side == FULL && !may_end(self, &view, page)))
            break;
        self->ended[self->ends++] = (Ended){side, (int32_t)page, born[page]};
        born[page] = FREED | serial;
        touch_pages(&now, page, page);
    }
    int right = k == items.count;
    if (right)
        end_touch(&now, side, 1, serial);
    else
        revive(self, FREED | serial);
    self->ends = 0;
    return answer(&read, right);
}

/* left_behind(slots, mapping): whether a free full page of `slots` still has a proved entry. */
static PyObject *left_behind(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(2, 0)
    const View view = view_of(self);
    const Items *slots = &read.items[0], *mapping = &read.items[1];
    if (!is_mapping(mapping))
        return answer(&read, 1);
    int64_t rows = (mapping->count < view.stamps ? mapping->count : view.stamps) - 1;
    int left = 0;
    for (int64_t k = 0; k < slots->count && !left; k++) {
        int64_t page = page_of(&view, item(slots, k), view.outside[FULL]);
        if (page == 0 || page == view.outside[FULL] || view.born[FULL][page] < FREED)
            continue;
        for (int64_t row = page * view.size; row < (page + 1) * view.size && row < rows; row++) {
            int64_t entry = item(mapping, row);
            left |= entry > 0 && entry < view.owners && proves(&view, row, entry);
        }
    }
    return answer(&read, left);
}

/* -- prefix trees ----------------------------------------------------------------------------- */

/* in_tree(yes): whether a prefix tree's own method runs from now on: what is freed is its to free. */
static PyObject *in_tree(PyObject *object, PyObject *yes)
{
    ((Books *)object)->in_tree = yes == Py_True;
    Py_RETURN_NONE;
}

/* betrayed(): whether somebody but the trees freed the window side of what a tree holds. */
static PyObject *betrayed(PyObject *object, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(((Books *)object)->betrayed);
}

/* A full slot whose page may be given to a tree, or is held by one: its page, else 0. */
static inline int64_t live_page(const View *view, int64_t slot)
{
    int64_t page = page_of(view, slot, view->outside[FULL]);
    return view->born[FULL][page] >= FREED ? 0 : page;
}

/* Whether the entry of a slot leads to a live window slot of its own. */
static inline int has_window(const View *view, const Items *mapping, int64_t slot)
{
    if (slot > mapping->count - 2 || slot > view->stamps - 2)
        return 0;
    int64_t entry = item(mapping, slot);
    return entry > 0 && entry < view->owners && proves(view, slot, entry);
}

/* adopted(slots, mapping, start, end, evicted, serial): whether a tree may take slots[start:end] over;
 * those at `evicted` and beyond with their window side. The tree vouches for them from now on. */
static PyObject *adopted(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(2, 4)
    const Items slots = read.items[0], mapping = read.items[1];
    int64_t start = read.number[0], end = read.number[1], evicted = read.number[2];
    if (start < 0 || end > slots.count)
        return refuse(&read, "adopted: a range beyond the slots");
    if (!is_mapping(&mapping))
        return answer(&read, 0);
    const View view = view_of(self);
    for (int64_t k = start; k < end; k++) {
        int64_t slot = item(&slots, k), page = live_page(&view, slot);
        if (!page || is_held(&view, page))
            return answer(&read, 0);
        if (k >= evicted && !has_window(&view, &mapping, slot))
            return answer(&read, 0);
    }
    for (int64_t k = start; k < end; k++)
        view.since[page_of(&view, item(&slots, k), view.outside[FULL])] = (int32_t)read.number[3];
    return answer(&read, 1);
}

/* How many slots the processor is asked for ahead of a look, and how many entries it fetches at once. */
#define MOST_AHEAD 256
#define AT_A_TIME 8

/* How many slots are looked at together; tests have smaller pools. */
#ifndef TOGETHER
#define TOGETHER 16
#endif

/* Whether a tree holds the slots from `slot` on, TOGETHER of them with the entries from `entry` on, all
 * within the books: as holds(), where they lie that way, and else not said. Without a branch, so that
 * several are looked at in one step; the caller knows that the page is the same for all if it has more
 * than one slot, on both sides. */
static int holds_together(const View *view, const int64_t *slots, const int64_t *entries, int64_t slot,
                          int64_t entry)
{
    const int32_t *stamp = view->stamp + slot, *owner = view->owner + entry;
    int64_t gaps = 0;
    int bad = 0;
    for (int j = 0; j < TOGETHER; j++)
        gaps |= (slots[j] - slot - j) | (entries[j] - entry - j);
    if (view->size > 1) {
        int64_t page = page_of(view, slot, view->outside[FULL]);
        int32_t far = view->born[WINDOW][page_of(view, entry, view->outside[WINDOW])];
        int32_t least = view->born[FULL][page], most = view->since[page];
        least = least > far ? least : far;
        for (int j = 0; j < TOGETHER; j++)
            bad |= (stamp[j] < least) | (stamp[j] > most) | (owner[j] != (int32_t)slot + j);
    } else {
        const int32_t *born = view->born[FULL] + slot, *far = view->born[WINDOW] + entry;
        const int32_t *since = view->since + slot;
        for (int j = 0; j < TOGETHER; j++)
            bad |= (stamp[j] < born[j]) | (stamp[j] < far[j]) | (stamp[j] > since[j]) |
                   (owner[j] != (int32_t)slot + j);
    }
    return !(bad || gaps);
}

/* Slots from `k` on that may be looked at together: those that are left, within the books and the pages
 * that `slot` and `entry` are in. */
static inline int64_t left_together(const View *view, int64_t slot, int64_t entry, int64_t rows,
                                    int64_t left)
{
    int64_t room = rows - slot < view->owners - entry ? rows - slot : view->owners - entry;
    if (view->size > 1) {
        int64_t near = view->size - inside_page(view, slot), far = view->size - inside_page(view, entry);
        near = near < far ? near : far;
        room = room < near ? room : near;
    } else {
        int64_t near = view->outside[FULL] - slot, far = view->outside[WINDOW] - entry;
        near = near < far ? near : far;
        room = room < near ? room : near;
    }
    return left < room ? left : room;
}

/* Ask for the memory that holds() is about to read, all at once: a match that splits a node is the first
 * to look at its slots, and each line would be waited for in turn. */
static void fetch_ahead(const View *view, const Items *slots, const Items *mapping, int64_t rows,
                        int64_t need)
{
    int64_t start = slots->count - (need < MOST_AHEAD ? need : MOST_AHEAD);
    for (int64_t k = start; k < slots->count; k += AT_A_TIME) {
        int64_t slot = clamp(item(slots, k), rows);
        __builtin_prefetch((const int64_t *)mapping->at + slot);
        __builtin_prefetch(view->stamp + slot);
        if (view->size == 1) {
            __builtin_prefetch(view->born[FULL] + slot);
            __builtin_prefetch(view->since + slot);
        }
    }
    for (int64_t k = start; k < slots->count; k += AT_A_TIME)
        __builtin_prefetch(view->owner +
                           clamp(item(mapping, clamp(item(slots, k), rows)), view->owners - 1));
}

/* Whether a tree holds the last `need` of `slots`, which are as many, still as it took them over. The
 * stamp of a page that is free is less than what it was born as. */
static int holds(const View *view, const Items *slots, const Items *mapping, int64_t need)
{
    int64_t rows = (mapping->count < view->stamps ? mapping->count : view->stamps) - 1;
    fetch_ahead(view, slots, mapping, rows, need);
    for (int64_t k = slots->count - need; k < slots->count;) {
        int64_t slot = item(slots, k), page = live_page(view, slot);
        if (!page || slot >= rows)
            return 0;
        int64_t entry = item(mapping, slot);
        if (entry <= 0 || entry >= view->owners)
            return 0;
        if (slots->wide && mapping->wide &&
            left_together(view, slot, entry, rows, slots->count - k) >= TOGETHER &&
            holds_together(view, (const int64_t *)slots->at + k, (const int64_t *)mapping->at + slot,
                           slot, entry)) {
            k += TOGETHER;
            continue;
        }
        /* As proves(), and the page is the one that was taken over: it is not younger than the stamp. */
        int32_t stamp = view->stamp[slot];
        int32_t far = view->born[WINDOW][page_of(view, entry, view->outside[WINDOW])];
        if ((stamp < far) | (stamp < view->born[FULL][page]) | (stamp > view->since[page]) |
            (view->owner[entry] != (int32_t)slot))
            return 0;
        k++;
    }
    return 1;
}

/* What a node's slots are known by, below 0: the first of them, and since when a tree holds its page. */
static int64_t name_of(const View *view, const Items *slots)
{
    int64_t first = slots->count ? item(slots, 0) : 0;
    int64_t since = view->since[page_of(view, first, view->outside[FULL])];
    return -1 - (clamp(first, INT32_MAX) << 31 | since);
}

/* held(slots, mapping, need): 1 where a tree holds the last `need` of `slots` still as it took them over,
 * window side and all; 0 where not; for fewer slots a number below 0 by which the caller may know them
 * again for as long as a tree holds the first. */
static PyObject *held(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    READ(2, 1)
    const Items *slots = &read.items[0], *mapping = &read.items[1];
    const View view = view_of(self);
    int64_t need = read.number[0], right = 0;
    if (need >= 0 && is_mapping(mapping))
        right = need > slots->count ? name_of(&view, slots) : holds(&view, slots, mapping, need);
    let_go(&read);
    return PyLong_FromLongLong(right);
}

/* Whether a tree holds the last `need` slots of a path whose last node has the slots `last`, which are
 * fewer: 1 or 0. `tails` tells by their name which nodes come before it, and how many slots these have;
 * below 0 where it does not, or they have not as many; 2 for errors. */
static int64_t held_before(const View *view, const Items *last, const Items *mapping, int64_t need,
                           PyObject *value_of, PyObject *full, PyObject *tails)
{
    PyObject *key = PyLong_FromLongLong(name_of(view, last)), *nodes;
    PyObject *tail = key ? PyDict_GetItemWithError(tails, key) : NULL;
    Py_XDECREF(key);
    if (!tail)
        return PyErr_Occurred() ? 2 : -1;
    int64_t total;
    if (!PyArg_ParseTuple(tail, "O!L", &PyTuple_Type, &nodes, &total))
        return 2;
    Py_INCREF(nodes); /* whoever is asked may forget it */
    int64_t right = holds(view, last, mapping, last->count);
    need -= last->count;
    for (Py_ssize_t k = 0; right == 1 && k < PyTuple_GET_SIZE(nodes); k++) {
        PyObject *const asked[] = {PyTuple_GET_ITEM(nodes, k), full};
        PyObject *part = PyObject_Vectorcall(value_of, asked, 2, NULL);
        Items slots = {0};
        if (!part || part == Py_None)
            right = part ? -1 : 2;
        else if (read_items(part, &slots) < 0)
            right = 2;
        else
            right = holds(view, &slots, mapping, need < slots.count ? need : slots.count);
        need -= need < slots.count ? need : slots.count;
        total -= slots.count;
        Py_XDECREF(slots.kept);
        Py_XDECREF(part);
    }
    Py_DECREF(nodes);
    return right == 1 && (need || total) ? -1 : right;
}

/* The slots of a match that says which, or of its last node; how many tokens are matched. NULL without
 * an error where there are none, or the match is of another kind. */
static PyObject *slots_of_match(PyObject *match, PyObject *value_of, PyObject *full, int64_t *length)
{
    if (value_of == Py_None) {
        PyObject *slots = PyObject_GetAttr(match, name_device_indices);
        if (slots && as_int64(PyObject_CallMethodNoArgs(slots, name_numel), length) < 0)
            Py_CLEAR(slots);
        return slots;
    }
    if (as_int64(PyObject_GetAttr(match, name_device_prefix_len), length) < 0 || !*length)
        return NULL;
    PyObject *node = PyObject_GetAttr(match, name_last_device_node), *slots = NULL;
    if (node && PyLong_CheckExact(node)) {
        PyObject *const asked[] = {node, full};
        slots = PyObject_Vectorcall(value_of, asked, 2, NULL);
        if (slots == Py_None)
            Py_CLEAR(slots);
    }
    Py_XDECREF(node);
    return slots;
}

/* How a match is proved: what its slots are asked of, and what comes before nodes (see proves). */
typedef struct {
    int64_t window;
    PyObject *value_of, *full, *tails;
} Way;

/* The length of a match that is proved; -1 where that cannot be said, -2 for errors. */
static int64_t proved_length(Books *self, PyObject *match, PyObject *tensor, const Way *way)
{
    int64_t length = -1, right = 0;
    PyObject *slots = slots_of_match(match, way->value_of, way->full, &length);
    if (!slots)
        return PyErr_Occurred() ? -2 : length ? -1 : 0;
    Items mapping = {0}, last = {0};
    int node = way->value_of != Py_None;
    if (read_items(tensor, &mapping) < 0 || read_items(slots, &last) < 0) {
        Py_XDECREF(mapping.kept);
        Py_DECREF(slots);
        return -2;
    }
    const View view = view_of(self);
    int64_t need = way->window < length ? way->window : length;
    if (need >= 0 && is_mapping(&mapping)) {
        if (need <= last.count)
            right = holds(&view, &last, &mapping, need);
        else if (node)
            right = held_before(&view, &last, &mapping, need, way->value_of, way->full, way->tails);
    }
    Py_DECREF(last.kept);
    Py_DECREF(mapping.kept);
    Py_DECREF(slots);
    return right == 2 ? -2 : right == 1 ? length : -1;
}

/* proves(match, mapping, window, value_of, full, tails): the length of a match whose last tokens, as many
 * as the window has or there are, a tree holds still as it took them over, window side and all; -1 where
 * that cannot be said, or not without a look at more than its last nodes. A match names its slots, or
 * its last node, an int, and value_of(node, full) says which slots that has; for nodes shorter than the
 * window, tails says by the name of their slots (see held) which nodes come before, the last first, and
 * how many slots these have. */
static PyObject *proves_match(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    if (given != 6 || !PyDict_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "proves takes six arguments, the last a dict");
    const Way way = {PyLong_AsLongLong(args[2]), args[3], args[4], args[5]};
    if (way.window == -1 && PyErr_Occurred())
        return NULL;
    int64_t length = proved_length((Books *)object, args[0], args[1], &way);
    return length == -2 ? NULL : PyLong_FromLongLong(length);
}

/* -- matches of one tree ---------------------------------------------------------------------- */

/* What proves() is told, and what became of it: all that a match costs in the usual case, in one call. */
typedef struct {
    PyObject_HEAD
    PyObject *guard;   /* .compiled are the books, .trees_suspect says that they are not enough */
    PyObject *state;   /* a dict with the mapping */
    PyObject *mapping; /* its name there */
    PyObject *virtual; /* nodes of this class are not looked at; or None */
    Way way;
    PyObject *books; /* tails are named by these */
    long long hits, misses, asked_tokens, hit_tokens;
} Look;

static PyTypeObject books_type;

/* Look(guard, state, mapping, virtual, window, value_of, full, tails) */
static PyObject *look_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *guard, *state, *mapping, *virtual, *value_of, *full, *tails;
    long long window;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Look takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO!UOLOOO!", &guard, &PyDict_Type, &state, &mapping, &virtual, &window,
                          &value_of, &full, &PyDict_Type, &tails))
        return NULL;
    Look *self = (Look *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->guard = Py_NewRef(guard);
    self->state = Py_NewRef(state);
    self->mapping = Py_NewRef(mapping);
    self->virtual = Py_NewRef(virtual);
    self->way = (Way){window, Py_NewRef(value_of), Py_NewRef(full), Py_NewRef(tails)};
    return (PyObject *)self;
}

static int look_traverse(PyObject *object, visitproc visit, void *arg)
{
    Look *self = (Look *)object;
    Py_VISIT(self->guard);
    Py_VISIT(self->state);
    Py_VISIT(self->mapping);
    Py_VISIT(self->virtual);
    Py_VISIT(self->way.value_of);
    Py_VISIT(self->way.full);
    Py_VISIT(self->way.tails);
    Py_VISIT(self->books);
    return 0;
}

static int look_clear(PyObject *object)
{
    Look *self = (Look *)object;
    Py_CLEAR(self->guard);
    Py_CLEAR(self->state);
    Py_CLEAR(self->mapping);
    Py_CLEAR(self->virtual);
    Py_CLEAR(self->way.value_of);
    Py_CLEAR(self->way.full);
    Py_CLEAR(self->way.tails);
    Py_CLEAR(self->books);
    return 0;
}

static void look_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    look_clear(object);
    Py_TYPE(object)->tp_free(object);
}

/* The books that are enough to prove a match: 1 and they are self->books; 0 for none, -1 for errors. */
static int look_at_books(Look *self)
{
    int suspect = is_true(PyObject_GetAttr(self->guard, name_trees_suspect));
    if (suspect)
        return suspect < 0 ? -1 : 0;
    PyObject *books = PyObject_GetAttr(self->guard, name_compiled);
    if (!books)
        return -1;
    if (books == self->books) {
        Py_DECREF(books);
        return 1;
    }
    if (!Py_IS_TYPE(books, &books_type)) {
        Py_DECREF(books);
        return 0;
    }
    PyDict_Clear(self->way.tails); /* serials were shifted, and names bear them */
    Py_XSETREF(self->books, books);
    return 1;
}

/* Whether a match ends in a node that is not to be looked at; -1 for errors. */
static int is_virtual(Look *self, PyObject *match)
{
    if (self->virtual == Py_None)
        return 0;
    PyObject *node = PyObject_GetAttr(match, name_last_device_node);
    int yes = node ? PyObject_IsInstance(node, self->virtual) : -1;
    Py_XDECREF(node);
    return yes;
}

/* found(match, params): whether a match is proved as by proves(); it is counted then. `params.key` is what
 * was asked for. */
static PyObject *found(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Look *self = (Look *)object;
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "found takes a match and its parameters");
    int able = look_at_books(self);
    int odd = able == 1 ? is_virtual(self, args[0]) : 0;
    if (able < 0 || odd < 0)
        return NULL;
    if (!able || odd)
        Py_RETURN_FALSE;
    PyObject *mapping = PyDict_GetItemWithError(self->state, self->mapping);
    if (!mapping) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, self->mapping);
        return NULL;
    }
    /* Python runs meanwhile, which may replace either. */
    PyObject *books = Py_NewRef(self->books);
    Py_INCREF(mapping);
    int64_t length = proved_length((Books *)books, args[0], mapping, &self->way);
    Py_DECREF(mapping);
    Py_DECREF(books);
    if (length < 0)
        return length == -2 ? NULL : Py_NewRef(Py_False);
    PyObject *key = PyObject_GetAttr(args[1], name_key);
    Py_ssize_t asked = key ? PyObject_Size(key) : -1;
    Py_XDECREF(key);
    if (asked < 0)
        return NULL;
    self->asked_tokens += asked;
    self->hits += length > 0;
    self->misses += length == 0;
    self->hit_tokens += length;
    Py_RETURN_TRUE;
}

/* -- module ----------------------------------------------------------------------------------- */

#define METHOD(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef books_methods[] = {
    METHOD(took),
    METHOD(continued),
    METHOD(freed),
    {"take_back", take_back, METH_O, NULL},
    METHOD(came),
    METHOD(came_alone),
    METHOD(left_behind),
    {"in_tree", in_tree, METH_O, NULL},
    {"betrayed", betrayed, METH_NOARGS, NULL},
    METHOD(adopted),
    METHOD(held),
    {"proves", (PyCFunction)(void (*)(void))proves_match, METH_FASTCALL, NULL},
    METHOD(touched),
    {NULL, NULL, 0, NULL},
};

static PyTypeObject books_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hicache_guard.kernels._books.Books",
    .tp_basicsize = sizeof(Books),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = books_methods,
    .tp_new = books_new,
    .tp_dealloc = books_dealloc,
};

static PyMethodDef look_methods[] = {
    METHOD(found),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef look_members[] = {
    {"hits", T_LONGLONG, offsetof(Look, hits), READONLY, NULL},
    {"misses", T_LONGLONG, offsetof(Look, misses), READONLY, NULL},
    {"asked_tokens", T_LONGLONG, offsetof(Look, asked_tokens), READONLY, NULL},
    {"hit_tokens", T_LONGLONG, offsetof(Look, hit_tokens), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject look_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hicache_guard.kernels._books.Look",
    .tp_basicsize = sizeof(Look),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = look_methods,
    .tp_members = look_members,
    .tp_new = look_new,
    .tp_traverse = look_traverse,
    .tp_clear = look_clear,
    .tp_dealloc = look_dealloc,
};

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_books",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__books(void)
{
    name_dtype = PyUnicode_InternFromString("dtype");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    name_numel = PyUnicode_InternFromString("numel");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_device_indices = PyUnicode_InternFromString("device_indices");
    name_device_prefix_len = PyUnicode_InternFromString("device_prefix_len");
    name_last_device_node = PyUnicode_InternFromString("last_device_node");
    name_trees_suspect = PyUnicode_InternFromString("trees_suspect");
    name_compiled = PyUnicode_InternFromString("compiled");
    name_key = PyUnicode_InternFromString("key");
    if (!name_dtype || !name_is_cpu || !name_is_contiguous || !name_numel || !name_data_ptr ||
        !name_device_indices || !name_device_prefix_len || !name_last_device_node ||
        !name_trees_suspect || !name_compiled || !name_key)
        return NULL;
    if (PyType_Ready(&books_type) < 0 || PyType_Ready(&look_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddObjectRef(module, "Books", (PyObject *)&books_type) < 0 ||
                   PyModule_AddObjectRef(module, "Look", (PyObject *)&look_type) < 0))
        Py_CLEAR(module);
    return module;
}
