/*
 * How an operation opens and closes where nothing is put off: its record, and whether anybody wrote
 * behind the seams since the last one.
 *
 * A scheduler's step makes some hundred short operations, and between SGLang's own work every Python
 * function that is called for one is cold. hicache_guard/adapters/link.py does the same in Python for
 * all other operations.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Operations remembered, as many as the journal does. */
#define STEPS 4096
#define MAX_WATCHED 4

typedef struct {
    int64_t serial;
    PyObject *name, *request, *code;
    int instruction;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *request; /* a ContextVar: on whose behalf operations are made */
    PyObject *dicts[MAX_WATCHED], *names[MAX_WATCHED], *expected[MAX_WATCHED];
    int watched;
    int64_t version; /* of the last that is watched, a tensor */
    Step *steps;
    int64_t made;
} Steps;

static PyObject *name_version;

/* Steps(request, [(dict, name), ...]): the last of the attributes is a tensor, whose writes are seen
 * as well. */
static PyObject *steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *request, *watched;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Steps takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO!", &request, &PyList_Type, &watched))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(watched);
    if (!PyContextVar_CheckExact(request) || count < 1 || count > MAX_WATCHED) {
        PyErr_SetString(PyExc_ValueError, "Steps: a ContextVar, and 1 to 4 attributes to watch");
        return NULL;
    }
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->request = Py_NewRef(request);
    self->steps = PyMem_Calloc(STEPS, sizeof(Step));
    if (!self->steps) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (; self->watched < count; self->watched++) {
        PyObject *dict, *name, *pair = PyList_GET_ITEM(watched, self->watched);
        if (!PyTuple_Check(pair)) {
            Py_DECREF(self);
            return PyErr_Format(PyExc_TypeError, "Steps: pairs of a dictionary and a name");
        }
        if (!PyArg_ParseTuple(pair, "O!U", &PyDict_Type, &dict, &name)) {
            Py_DECREF(self);
            return NULL;
        }
        self->dicts[self->watched] = Py_NewRef(dict);
        self->names[self->watched] = Py_NewRef(name);
    }
    return (PyObject *)self;
}

static int steps_traverse(PyObject *object, visitproc visit, void *arg)
{
    Steps *self = (Steps *)object;
    for (int k = 0; k < self->watched; k++) {
        Py_VISIT(self->dicts[k]);
        Py_VISIT(self->expected[k]);
    }
    return 0;
}

static int steps_clear(PyObject *object)
{
    Steps *self = (Steps *)object;
    for (int k = 0; k < MAX_WATCHED; k++) {
        Py_CLEAR(self->dicts[k]);
        Py_CLEAR(self->names[k]);
        Py_CLEAR(self->expected[k]);
    }
    self->watched = 0;
    return 0;
}

static void steps_dealloc(PyObject *object)
{
    Steps *self = (Steps *)object;
    PyObject_GC_UnTrack(object);
    steps_clear(object);
    Py_CLEAR(self->request);
    for (int64_t k = 0; self->steps && k < STEPS; k++) {
        Py_CLEAR(self->steps[k].name);
        Py_CLEAR(self->steps[k].request);
        Py_CLEAR(self->steps[k].code);
    }
    PyMem_Free(self->steps);
    Py_TYPE(object)->tp_free(object);
}

static int version_of(PyObject *tensor, int64_t *version)
{
    PyObject *found = PyObject_GetAttr(tensor, name_version);
    if (!found)
        return -1;
    *version = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *version == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The k-th attribute is as it should be. */
static int expect_what_is_there(Steps *self, long k)
{
    PyObject *found = PyDict_GetItemWithError(self->dicts[k], self->names[k]);
    if (!found && PyErr_Occurred())
        return -1;
    Py_XINCREF(found);
    Py_XSETREF(self->expected[k], found);
    return 0;
}

/* accept(number): one of the attributes that are watched is as it should be. */
static PyObject *accept(PyObject *object, PyObject *which)
{
    Steps *self = (Steps *)object;
    long k = PyLong_AsLong(which);
    if (k == -1 && PyErr_Occurred())
        return NULL;
    if (k < 0 || k >= self->watched)
        return PyErr_Format(PyExc_IndexError, "accept: there is no such attribute");
    if (expect_what_is_there(self, k) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* leave(): everything that is watched is as it should be. */
static PyObject *leave(PyObject *object, PyObject *unused)
{
    Steps *self = (Steps *)object;
    (void)unused;
    if (self->watched < 1)
        return PyErr_Format(PyExc_RuntimeError, "nothing is watched any more");
    for (int k = 0; k < self->watched; k++)
        if (expect_what_is_there(self, k) < 0)
            return NULL;
    PyObject *last = self->expected[self->watched - 1];
    if (!last || version_of(last, &self->version) < 0)
        return last ? NULL : PyErr_Format(PyExc_KeyError, "what is watched is gone");
    Py_RETURN_NONE;
}

/* A bit for each that is watched and is not as it was left; -1 for errors. */
static int what_changed(Steps *self)
{
    int changed = 0, last = self->watched - 1;
    if (last < 0) {
        PyErr_SetString(PyExc_RuntimeError, "nothing is watched any more");
        return -1;
    }
    for (int k = 0; k < self->watched; k++) {
        PyObject *found = PyDict_GetItemWithError(self->dicts[k], self->names[k]);
        if (!found && PyErr_Occurred())
            return -1;
        changed |= (!found || found != self->expected[k]) << k;
    }
    int64_t version;
    if (changed >> last)
        return changed;
    if (version_of(self->expected[last], &version) < 0)
        return -1;
    return changed | (version != self->version) << last;
}

/* changed(): a bit for each that is watched and is not as it was left. */
static PyObject *changed(PyObject *object, PyObject *unused)
{
    int bits = what_changed((Steps *)object);
    (void)unused;
    return bits < 0 ? NULL : PyLong_FromLong(bits);
}

/* forget(): serials begin anew. */
static PyObject *forget(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((Steps *)object)->made = 0;
    Py_RETURN_NONE;
}

/* enter(serial, name, frame): record an operation that `frame` asked for; whether everything that is
 * watched is as it was left. */
static PyObject *enter(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Steps *self = (Steps *)object;
    if (given != 3 || !PyUnicode_Check(args[1]) || !PyFrame_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "enter takes a serial, a name and a frame");
    int64_t serial = PyLong_AsLongLong(args[0]);
    PyObject *request = NULL;
    if ((serial == -1 && PyErr_Occurred()) || PyContextVar_Get(self->request, Py_None, &request) < 0)
        return NULL;
    Step *step = &self->steps[self->made++ % STEPS];
    step->serial = serial;
    Py_INCREF(args[1]);
    Py_XSETREF(step->name, args[1]);
    Py_XSETREF(step->request, request);
    Py_XSETREF(step->code, (PyObject *)PyFrame_GetCode((PyFrameObject *)args[2]));
    step->instruction = PyFrame_GetLasti((PyFrameObject *)args[2]);
    int bits = what_changed(self);
    return bits < 0 ? NULL : PyBool_FromLong(bits == 0);
}

/* find(serial): (serial, name, request, code, instruction) of an operation, or None. */
static PyObject *find(PyObject *object, PyObject *wanted)
{
    Steps *self = (Steps *)object;
    int64_t serial = PyLong_AsLongLong(wanted);
    if (serial == -1 && PyErr_Occurred())
        return NULL;
    for (int64_t k = self->made - 1; k >= 0 && k >= self->made - STEPS; k--) {
        const Step *step = &self->steps[k % STEPS];
        if (step->serial == serial)
            return Py_BuildValue("(LOOOi)", (long long)step->serial, step->name, step->request,
                                 step->code, step->instruction);
    }
    Py_RETURN_NONE;
}

static PyMethodDef steps_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))enter, METH_FASTCALL, NULL},
    {"accept", accept, METH_O, NULL},
    {"changed", changed, METH_NOARGS, NULL},
    {"forget", forget, METH_NOARGS, NULL},
    {"leave", leave, METH_NOARGS, NULL},
    {"find", find, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject steps_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hicache_guard.kernels._steps.Steps",
    .tp_basicsize = sizeof(Steps),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = steps_methods,
    .tp_traverse = steps_traverse,
    .tp_clear = steps_clear,
    .tp_new = steps_new,
    .tp_dealloc = steps_dealloc,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_steps",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__steps(void)
{
    name_version = PyUnicode_InternFromString("_version");
    if (!name_version || PyType_Ready(&steps_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Steps", (PyObject *)&steps_type) < 0)
        Py_CLEAR(module);
    return module;
}
