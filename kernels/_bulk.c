/*
 * The bulk questions and bulk writes of the guard's books, on a CPU, one pass each.
 *
 * hicache_guard/core/compiled.py calls these in place of chains of torch operators; what each
 * answers is defined there and in core/ledger.py and core/windowmap.py. The books come by the buffer
 * protocol, so their lengths and types are known here. What notes name comes as Parts: the notes'
 * own tensors, read where they lie, since joining or converting them costs more than all questions
 * about them. Every slot is whatever a caller handed to a free: it is checked or clamped against the
 * books before it is followed.
 *
 * Names: "born", "claims", "stamp" and "owner" are the int32 books. The last page of a ledger,
 * "outside", stands for every page beyond the pool.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define FREED (INT32_C(1) << 30)
#define MAX_ARRAYS 8

/* -- parts ------------------------------------------------------------------------------------ */

typedef struct {
    const void *at;
    int64_t count;
    int wide; /* int64, else int32 */
    int32_t serial;
} Part;

/* Tensors of several notes: slots, `per` of them a page, or page ids (`per` 1). */
typedef struct {
    PyObject_HEAD
    PyObject *kept; /* list of the tensors, so that they outlive their addresses */
    Part *parts;
    Py_ssize_t used;
    long long per, total;
} Parts;

/* Given by prepare(): torch's dtypes, and what makes any tensor one that can be read here. */
static PyObject *int32_type, *int64_type, *fitted;
static PyObject *name_dtype, *name_is_cpu, *name_is_contiguous, *name_numel, *name_data_ptr;

static PyObject *prepare(PyObject *self, PyObject *args)
{
    PyObject *narrow, *wide, *fit;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO", &narrow, &wide, &fit))
        return NULL;
    Py_INCREF(narrow);
    Py_INCREF(wide);
    Py_INCREF(fit);
    Py_XSETREF(int32_type, narrow);
    Py_XSETREF(int64_type, wide);
    Py_XSETREF(fitted, fit);
    Py_RETURN_NONE;
}

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

static int read_part(Parts *self, Py_ssize_t k, PyObject *tensor)
{
    Part *part = &self->parts[k];
    int fits = readable(tensor, &part->wide);
    if (fits < 0)
        return -1;
    if (fits) {
        Py_INCREF(tensor);
    } else {
        tensor = PyObject_CallOneArg(fitted, tensor);
        fits = tensor ? readable(tensor, &part->wide) : -1;
        if (fits < 1) {
            Py_XDECREF(tensor);
            if (!fits)
                PyErr_SetString(PyExc_TypeError, "a tensor that cannot be read");
            return -1;
        }
    }
    PyList_SET_ITEM(self->kept, k, tensor);
    int64_t address;
    if (as_int64(PyObject_CallMethodNoArgs(tensor, name_numel), &part->count) < 0 ||
        as_int64(PyObject_CallMethodNoArgs(tensor, name_data_ptr), &address) < 0)
        return -1;
    part->at = (const void *)(intptr_t)address;
    part->serial = 0;
    return 0;
}

/* Parts(tensors, serials, per): lists; `serials` empty or one for each tensor. */
static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tensors, *serials;
    long long per;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Parts takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!L", &PyList_Type, &tensors, &PyList_Type, &serials, &per))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(tensors), given = PyList_GET_SIZE(serials);
    if (per < 1 || !fitted || (given && given != count)) {
        PyErr_SetString(PyExc_ValueError, "Parts: sizes do not fit");
        return NULL;
    }
    Parts *self = (Parts *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->per = per;
    self->parts = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Part));
    self->kept = PyList_New(count);
    if (!self->parts || !self->kept) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        /* The lists are only read here, but conversions run Python. */
        if (PyList_GET_SIZE(tensors) != count || read_part(self, k, PyList_GET_ITEM(tensors, k))) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "Parts: the list has changed");
            Py_DECREF(self);
            return NULL;
        }
    }
    self->used = count;
    for (Py_ssize_t k = 0; k < count; k++)
        self->total += self->parts[k].count;
    for (Py_ssize_t k = 0; k < given && k < PyList_GET_SIZE(serials); k++) {
        long serial = PyLong_AsLong(PyList_GET_ITEM(serials, k));
        if (serial == -1 && PyErr_Occurred()) {
            Py_DECREF(self);
            return NULL;
        }
        self->parts[k].serial = (int32_t)serial;
    }
    return (PyObject *)self;
}

static void parts_dealloc(PyObject *object)
{
    Parts *self = (Parts *)object;
    Py_XDECREF(self->kept);
    PyMem_Free(self->parts);
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef parts_members[] = {
    {"total", T_LONGLONG, offsetof(Parts, total), READONLY, "Items in all parts."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject parts_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hicache_guard.kernels._bulk.Parts",
    .tp_basicsize = sizeof(Parts),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_members = parts_members,
    .tp_new = parts_new,
    .tp_dealloc = parts_dealloc,
};

static inline int64_t item(const Part *part, int64_t k)
{
    return part->wide ? ((const int64_t *)part->at)[k] : ((const int32_t *)part->at)[k];
}

/* Whether two gatherings consist of parts of the same lengths. */
static int alike(const Parts *one, const Parts *other)
{
    if (one->used != other->used)
        return 0;
    for (Py_ssize_t p = 0; p < one->used; p++)
        if (one->parts[p].count != other->parts[p].count)
            return 0;
    return 1;
}

#define FOR_EACH_PART(gathered, part)                                                              \
    for (const Part *part = (gathered)->parts; part < (gathered)->parts + (gathered)->used; part++)

/* -- pages ------------------------------------------------------------------------------------ */

static inline int64_t clamp(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value > most ? most : value;
}

/* How slots divide into pages: by a shift where the size is a power of two. */
typedef struct {
    int64_t size;
    int shift; /* -1 for none */
} Paging;

static Paging paging(int64_t size)
{
    Paging found = {size, -1};
    if ((size & (size - 1)) == 0)
        for (found.shift = 0; INT64_C(1) << found.shift < size;)
            found.shift++;
    return found;
}

static inline int64_t page_of(int64_t slot, Paging by, int64_t outside)
{
    if (slot < 0)
        return 0;
    int64_t page = by.shift >= 0 ? slot >> by.shift : slot / by.size;
    return page > outside ? outside : page;
}

static inline int inside_page(int64_t slot, Paging by)
{
    return by.shift >= 0 ? (slot & (by.size - 1)) != 0 : slot % by.size != 0;
}

/* -- arguments -------------------------------------------------------------------------------- */

typedef struct {
    int32_t *at;
    int64_t count;
} Array;

typedef struct {
    int64_t *at;
    int64_t count;
} LongArray;

/* The buffers that one call holds; released together. */
typedef struct {
    Py_buffer views[MAX_ARRAYS];
    int used;
} Buffers;

static void let_go(Buffers *buffers)
{
    while (buffers->used)
        PyBuffer_Release(&buffers->views[--buffers->used]);
}

static int take_array(Buffers *buffers, PyObject *from, int size, void *array)
{
    if (buffers->used == MAX_ARRAYS) {
        PyErr_SetString(PyExc_ValueError, "too many arrays");
        return -1;
    }
    Py_buffer *view = &buffers->views[buffers->used];
    if (PyObject_GetBuffer(from, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0)
        return -1;
    buffers->used++;
    const char *format = view->format ? view->format : "B";
    if (view->itemsize != size || !format[0] || format[1] || !strchr("ilq", format[0])) {
        PyErr_Format(PyExc_TypeError, "expected int%d, found items of type %s", size * 8, format);
        return -1;
    }
    Array *found = array;
    found->at = view->buf;
    found->count = view->len / size;
    return 0;
}

/*
 * Reads arguments by a format, a letter each: i and q for arrays of int32 and int64 (books, or what
 * is to be filled), p for Parts, n for a number. `out` receives pointers to Array, LongArray,
 * Parts * and int64_t.
 */
static int read_arguments(Buffers *buffers, PyObject *const *args, Py_ssize_t given,
                          const char *format, void *const *out)
{
    buffers->used = 0;
    if (given != (Py_ssize_t)strlen(format)) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, found %zd",
                     (Py_ssize_t)strlen(format), given);
        return -1;
    }
    for (Py_ssize_t k = 0; k < given; k++) {
        int failed = 0;
        if (format[k] == 'i' || format[k] == 'q') {
            failed = take_array(buffers, args[k], format[k] == 'q' ? 8 : 4, out[k]);
        } else if (format[k] == 'p') {
            failed = !Py_IS_TYPE(args[k], &parts_type);
            if (failed)
                PyErr_SetString(PyExc_TypeError, "expected Parts");
            *(Parts **)out[k] = (Parts *)args[k];
        } else {
            long long value = PyLong_AsLongLong(args[k]);
            failed = value == -1 && PyErr_Occurred();
            *(int64_t *)out[k] = value;
        }
        if (failed) {
            let_go(buffers);
            return -1;
        }
    }
    return 0;
}

static PyObject *refuse(Buffers *buffers, const char *why)
{
    let_go(buffers);
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

static PyObject *answer(Buffers *buffers, int yes)
{
    let_go(buffers);
    return PyBool_FromLong(yes);
}

#define CALL(format, ...)                                                                          \
    Buffers buffers;                                                                               \
    void *const out[] = {__VA_ARGS__};                                                             \
    (void)self;                                                                                    \
    if (read_arguments(&buffers, args, given, format, out) < 0)                                    \
        return NULL;

/* -- ledgers ---------------------------------------------------------------------------------- */

/* hand_out(born, slots, pages): the pages whose first slot is among `slots` belong to its part's
 * serial. `pages` becomes the page of each such slot, and `outside` for the others. */
static PyObject *hand_out(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Array born, pages;
    Parts *slots;
    CALL("ipi", &born, &slots, &pages)
    if (pages.count != slots->total || !born.count)
        return refuse(&buffers, "hand_out: sizes do not fit");
    Paging by = paging(slots->per);
    int64_t outside = born.count - 1;
    int32_t *page = pages.at;
    FOR_EACH_PART(slots, part)
        for (int64_t k = 0; k < part->count; k++) {
            int64_t slot = item(part, k);
            int64_t begun = inside_page(slot, by) ? outside : page_of(slot, by, outside);
            born.at[begun] = part->serial;
            *page++ = (int32_t)begun;
        }
    born.at[outside] = FREED;
    return answer(&buffers, 1);
}

/* release(born, named, pages): the pages of `named` are free since their part's serial. `pages`
 * becomes the page of each item. */
static PyObject *release(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Array born, pages;
    Parts *named;
    CALL("ipi", &born, &named, &pages)
    if (pages.count != named->total || !born.count)
        return refuse(&buffers, "release: sizes do not fit");
    Paging by = paging(named->per);
    int32_t *page = pages.at;
    FOR_EACH_PART(named, part)
        for (int64_t k = 0; k < part->count; k++) {
            *page = (int32_t)page_of(item(part, k), by, born.count - 1);
            born.at[*page++] = FREED | part->serial;
        }
    return answer(&buffers, 1);
}

/* claim(claims, born, named, base, forbidden, required, set, live, padding): whether the claim on a
 * page of `named` has a bit of `forbidden`, lacks one of `required`, or (`live`) the page is not live;
 * each page adds the bits `set` to its claim, one after the other. Claims of another `base`, whose
 * low three bits are clear, count as none. `padding`: 0 page 0 is like any other, 1 it makes no claim
 * and is not asked, -1 it is wrong. */
static PyObject *claim(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Array claims, born;
    Parts *named;
    int64_t base, forbidden, required, set, live, padding;
    CALL("iipnnnnnn", &claims, &born, &named, &base, &forbidden, &required, &set, &live, &padding)
    if (!claims.count || claims.count != born.count)
        return refuse(&buffers, "claim: sizes do not fit");
    Paging by = paging(named->per);
    int wrong = 0;
    FOR_EACH_PART(named, part)
        for (int64_t k = 0; k < part->count; k++) {
            int64_t page = page_of(item(part, k), by, claims.count - 1);
            if (live)
                wrong |= born.at[page] >= FREED;
            if (page == 0 && padding) {
                wrong |= padding < 0;
                continue;
            }
            int32_t held = claims.at[page];
            int32_t bits = (held & ~7) == (int32_t)base ? held & 7 : 0;
            wrong |= (bits & (int32_t)forbidden) | (~bits & (int32_t)required);
            claims.at[page] = (int32_t)base | bits | (int32_t)set;
        }
    return answer(&buffers, wrong);
}

/* -- the mapping's book ----------------------------------------------------------------------- */

/* record(stamp, owner, rows, slots): entries rows -> slots were written at their part's serial. */
static PyObject *record(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Array stamp, owner;
    Parts *rows, *slots;
    CALL("iipp", &stamp, &owner, &rows, &slots)
    if (!alike(rows, slots) || !stamp.count || !owner.count)
        return refuse(&buffers, "record: sizes do not fit");
    for (Py_ssize_t p = 0; p < rows->used; p++) {
        const Part *row = &rows->parts[p], *slot = &slots->parts[p];
        for (int64_t k = 0; k < row->count; k++) {
            int64_t full = clamp(item(row, k), stamp.count - 1);
            stamp.at[full] = row->serial;
            owner.at[clamp(item(slot, k), owner.count - 1)] = (int32_t)full;
        }
    }
    return answer(&buffers, 1);
}

/* What proves an entry; see core/windowmap.py. */
typedef struct {
    Array stamp, owner, full_born, window_born;
    Paging by;
} Book;

static int is_whole(const Book *book)
{
    return book->stamp.count > 1 && book->owner.count && book->full_born.count &&
           book->window_born.count;
}

/* Whether the entry row -> slot is proved; both within the books, the entry not empty. */
static inline int proves(const Book *book, int64_t row, int64_t slot)
{
    int32_t stamp = book->stamp.at[row];
    int32_t born = book->full_born.at[page_of(row, book->by, book->full_born.count - 1)];
    int32_t far = book->window_born.at[page_of(slot, book->by, book->window_born.count - 1)];
    return (stamp >= far) & ((stamp >= born) | (born >= FREED)) &
           (book->owner.at[slot] == (int32_t)row);
}

/* any_wrong_entry(stamp, owner, full_born, window_born, rows, entries, some_empty): whether a row or
 * an entry is out of range, or an entry not proved; an empty one is no fault where `some_empty`. */
static PyObject *any_wrong_entry(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Book book;
    Parts *rows, *entries;
    int64_t some_empty;
    CALL("iiiippn", &book.stamp, &book.owner, &book.full_born, &book.window_born, &rows, &entries,
         &some_empty)
    if (!alike(rows, entries) || !is_whole(&book))
        return refuse(&buffers, "any_wrong_entry: sizes do not fit");
    book.by = paging(rows->per);
    int wrong = 0;
    for (Py_ssize_t p = 0; p < rows->used && !wrong; p++) {
        const Part *from = &rows->parts[p], *to = &entries->parts[p];
        for (int64_t k = 0; k < from->count; k++) {
            int64_t row = item(from, k), entry = item(to, k);
            if (row < 0 || row > book.stamp.count - 2 || entry < 0 || entry >= book.owner.count)
                wrong = 1;
            else if (entry == 0)
                wrong |= !some_empty;
            else
                wrong |= !proves(&book, row, entry);
        }
    }
    return answer(&buffers, wrong);
}

/* any_not_continued(stamp, owner, full_born, window_born, slots, windows, lengths, back): whether a
 * request whose page is not full at its length continues after an entry that is empty or not
 * proved: the one `back` before slot -> window. A slot below 0 continues nothing. */
static PyObject *any_not_continued(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Book book;
    Parts *slots, *windows, *lengths;
    int64_t back;
    CALL("iiiipppn", &book.stamp, &book.owner, &book.full_born, &book.window_born, &slots, &windows,
         &lengths, &back)
    if (!alike(slots, windows) || !alike(slots, lengths) || !is_whole(&book))
        return refuse(&buffers, "any_not_continued: sizes do not fit");
    book.by = paging(slots->per);
    int wrong = 0;
    for (Py_ssize_t p = 0; p < slots->used && !wrong; p++) {
        const Part *slot = &slots->parts[p], *window = &windows->parts[p];
        const Part *length = &lengths->parts[p];
        for (int64_t k = 0; k < slot->count; k++) {
            int64_t row = item(slot, k), entry = item(window, k);
            if (!inside_page(item(length, k), book.by) || row < back)
                continue;
            if (entry <= back || entry - back >= book.owner.count)
                wrong = 1;
            else
                wrong |= !proves(&book, clamp(row - back, book.stamp.count - 2), entry - back);
        }
    }
    return answer(&buffers, wrong);
}

/* any_mapped(mapping, outside, slots): whether a row of the full pages of `slots` has an entry; the
 * last row stands for those beyond. */
static PyObject *any_mapped(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    LongArray mapping;
    int64_t outside;
    Parts *slots;
    CALL("qnp", &mapping, &outside, &slots)
    if (mapping.count < 2 || outside < 0)
        return refuse(&buffers, "any_mapped: sizes do not fit");
    Paging by = paging(slots->per);
    int64_t last = mapping.count - 2;
    int wrong = 0;
    FOR_EACH_PART(slots, part)
        for (int64_t k = 0; k < part->count; k++) {
            int64_t first = page_of(item(part, k), by, outside) * by.size;
            for (int64_t row = first; row < first + by.size; row++)
                wrong |= mapping.at[clamp(row, last)] > 0;
        }
    return answer(&buffers, wrong);
}

/* -- module ----------------------------------------------------------------------------------- */

#define METHOD(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    METHOD(hand_out),
    METHOD(release),
    METHOD(claim),
    METHOD(record),
    METHOD(any_wrong_entry),
    METHOD(any_not_continued),
    METHOD(any_mapped),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_bulk",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__bulk(void)
{
    name_dtype = PyUnicode_InternFromString("dtype");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    name_numel = PyUnicode_InternFromString("numel");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    if (!name_dtype || !name_is_cpu || !name_is_contiguous || !name_numel || !name_data_ptr)
        return NULL;
    if (PyType_Ready(&parts_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Parts", (PyObject *)&parts_type) < 0)
        Py_CLEAR(module);
    return module;
}
