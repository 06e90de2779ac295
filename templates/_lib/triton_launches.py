# Several launches by one call of C, which Python would take ten times as long for, or by one of a
# CUDA graph, which the driver takes less for than for two launches.

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile

# What a replay launches. A number that a launch is given is one of the call's own words and so many
# bytes behind it or, of the form, the same in each call. Kernels read as many of its eight bytes as
# theirs has; functions of C++ take whole numbers and addresses, which are passed alike.
LAUNCHES_IN_C = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
  int64_t from;  // which of the call's words, or -1: none
  uint64_t more;
} Given;

typedef struct {
  const char *name;
  void *function;  // of the driver's a kernel, where it has threads
  const Given *given;
  uint32_t num_given, blocks[3], threads, shared;
} Launch;

typedef struct {  // in the order of LAUNCHES_DRIVER
  int (*get_context)(void **);
  int (*set_bytes)(uint64_t, unsigned char, size_t, void *);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                void **, void **);
  int (*make_stream)(void **, unsigned);
  int (*end_stream)(void *);
  int (*is_captured)(void *, int *);
  int (*begin_capture)(void *, int);
  int (*end_capture)(void *, void **);
  int (*make_graph)(void **, void *, unsigned long long);
  int (*end_captured)(void *);
  int (*launch_graph)(void *, void *);
  int (*exchange_mode)(int *);
  int (*end_graph)(void *);
} Driver;

static _Thread_local char message[4096];

static const char *called(void *function, const uint64_t *given, uint32_t count) {
  switch (count) {
CASES
  }
  return "it takes too many numbers";
}

// Of the words the first is the stream, the second where the call's block of memory is, and the third
// how many bytes of it are set to zero. It returns what went wrong: nothing is launched behind that.
const char *launch_all(const Driver *driver, const Launch *launches, int end,
                       const uint64_t *words) {
  void *context = NULL, *stream = (void *)words[0];
  if (driver->get_context(&context) != 0 || context == NULL) return "no context";
  if (words[2] > 0) {
    const int code = driver->set_bytes(words[1], 0, words[2], stream);
    if (code != 0) {
      snprintf(message, sizeof message, "cuMemsetD8Async: CUDA's driver says %d", code);
      return message;
    }
  }
  for (int i = 0; i < end; ++i) {
    const Launch *it = launches + i;
    uint64_t values[MOST_GIVEN];
    void *places[MOST_GIVEN];
    for (uint32_t j = 0; j < it->num_given; ++j) {
      const Given given = it->given[j];
      values[j] = given.from < 0 ? given.more : words[given.from] + given.more;
      places[j] = values + j;
    }
    if (it->threads == 0) {
      const char *said = called(it->function, values, it->num_given);
      if (said == NULL) continue;
      snprintf(message, sizeof message, "%s: %s", it->name, said);
      return message;
    }
    const int code = driver->launch(it->function, it->blocks[0], it->blocks[1], it->blocks[2],
                                    it->threads, 1, 1, it->shared, stream, places, NULL);
    if (code == 0) continue;
    snprintf(message, sizeof message, "%s: CUDA's driver says %d", it->name, code);
    return message;
  }
  return NULL;
}

// As launch_all by a graph of it that was made before, of the same words.
const char *launch_graph(const Driver *driver, void *graph, const uint64_t *words) {
  void *context = NULL, *stream = (void *)words[0];
  int captured = 0;
  if (driver->get_context(&context) != 0 || context == NULL) return "no context";
  if (driver->is_captured(stream, &captured) != 0 || captured != 0) return "captured";
  const int code = driver->launch_graph(graph, stream);
  if (code == 0) return NULL;
  snprintf(message, sizeof message, "cuGraphLaunch: CUDA's driver says %d", code);
  return message;
}

// Makes a graph of what launch_all launches.
const char *make_graph(const Driver *driver, const Launch *launches, int end, uint64_t *words,
                       void **graph) {
  void *stream = NULL, *nodes = NULL;
  int captured = 0, mode = 2;  // others may capture meanwhile, which this is not to keep them from
  if (driver->is_captured((void *)words[0], &captured) != 0 || captured != 0) return "captured";
  driver->exchange_mode(&mode);
  const char *said = NULL;
  int code = driver->make_stream(&stream, 1);  // which waits for no other
  if (code == 0) {
    code = driver->begin_capture(stream, 2);
    if (code == 0) {
      words[0] = (uint64_t)stream;
      said = launch_all(driver, launches, end, words);
      code = driver->end_capture(stream, &nodes);
    }
    if (code == 0 && said == NULL) code = driver->make_graph(graph, nodes, 0);
    if (nodes != NULL) driver->end_captured(nodes);
    driver->end_stream(stream);
  }
  driver->exchange_mode(&mode);
  if (code == 0) return said;
  snprintf(message, sizeof message, "of a graph CUDA's driver says %d", code);
  return message;
}
"""
MOST_GIVEN = 256  # numbers of one launch; of a function of C++ a quarter


class GivenNumber(ctypes.Structure):
    _fields_ = [("origin", ctypes.c_int64), ("more", ctypes.c_uint64)]


class OneLaunch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("given", ctypes.POINTER(GivenNumber)),
        ("num_given", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    ]


def made_cache():
    # The folder in which Triton keeps what it compiled.
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    os.makedirs(folder, exist_ok=True)
    return folder


def text_of_launches():
    cases = []
    for count in range(1, MOST_GIVEN // 4 + 1):
        kinds = ", ".join(["uint64_t"] * count)
        given = ", ".join(f"given[{i}]" for i in range(count))
        cases.append(f"    case {count}: return ((const char *(*)({kinds}))function)({given});")
    text = LAUNCHES_IN_C.replace("CASES", "\n".join(cases))
    return text.replace("MOST_GIVEN", str(MOST_GIVEN))


@functools.cache
def launches_library():
    # Compiled once for each content, by the compiler that Triton needs as well.
    text, compiler = text_of_launches(), os.environ.get("CC")
    compiler = compiler or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        raise OSError("no compiler of C")
    key = hashlib.sha256(f"{text}\0{compiler}\0{platform.machine()}".encode()).hexdigest()[:32]
    folder = made_cache()
    path = os.path.join(folder, f"launches-{key}.so")
    if not os.path.exists(path):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = os.path.join(scratch, "launches.c"), os.path.join(scratch, "made.so")
            with open(source, "w") as file:
                file.write(text)
            command = [compiler, "-O2", "-std=c11", "-shared", "-fPIC", source, "-o", made]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{' '.join(command)}: {done.stderr}")
            os.replace(made, path)  # whoever was faster made the same
    library = ctypes.CDLL(path)
    for function in (library.launch_all, library.launch_graph, library.make_graph):
        function.restype = ctypes.c_char_p
    return library


LAUNCHES_DRIVER = (
    "cuCtxGetCurrent", "cuMemsetD8Async", "cuLaunchKernel", "cuStreamCreate", "cuStreamDestroy_v2",
    "cuStreamIsCapturing", "cuStreamBeginCapture_v2", "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphLaunch",
    "cuThreadExchangeStreamCaptureMode", "cuGraphExecDestroy",
)  # fmt: skip


@functools.cache
def launches_driver(path="libcuda.so.1"):
    library = ctypes.CDLL(path)
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in LAUNCHES_DRIVER]
    return (ctypes.c_void_p * len(found))(*found)


class LaunchedGraph:
    # A graph of launches, which ends when nobody launches it any more.

    num_alive = 0  # each takes some 0.1 MB of the device's memory

    def __init__(self, address, driver):
        type(self).num_alive += 1
        self.address = address
        self.end = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(driver[-1])

    def __del__(self):
        type(self).num_alive -= 1  # as Python ends, names of the file are gone already
        self.end(self.address)
