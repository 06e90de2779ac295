// Those functions of CUDA's driver that a replay calls, with kernels that are functions of C.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int num_launches = 0, num_graphs = 0, num_graph_launches = 0, is_user_capturing = 0;
static void* context = (void*)1;

int launches_so_far(void) { return num_launches; }

int graphs_there_are(void) { return num_graphs; }

int graph_launches_so_far(void) { return num_graph_launches; }

void set_capturing(int value) { is_user_capturing = value; }

void set_context(void* value) { context = value; }

int cuCtxGetCurrent(void** found) {
  *found = context;
  return 0;
}

// What a graph does, in order: it sets bytes to zero, or launches a kernel.
typedef struct {
  void* kernel;
  unsigned blocks;
  unsigned long long given[7];  // as many as the kernels below have at most
  size_t count;
} Node;

typedef struct {
  int count;
  Node nodes[64];
} Graph;

static _Thread_local Graph* capture = NULL;  // into which this thread's calls go, by its stream

static int done(const Node* node) {
  if (node->kernel == NULL) return memset((void*)node->given[0], 0, node->count) == NULL;
  __atomic_fetch_add(&num_launches, 1, __ATOMIC_RELAXED);
  void* parameters[7];
  for (int i = 0; i < 7; ++i) parameters[i] = (void*)(node->given + i);
  for (unsigned block = 0; block < node->blocks; ++block)
    ((void (*)(void**, unsigned))node->kernel)(parameters, block);
  return 0;
}

static int done_on(void* stream, const Node* node) {
  if (capture == NULL || stream != (void*)capture) return stream == (void*)7 ? done(node) : 2;
  if (capture->count == 64) return 3;
  capture->nodes[capture->count++] = *node;
  return 0;
}

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t count, void* stream) {
  const Node node = {NULL, 0, {to}, count};
  return value == 0 ? done_on(stream, &node) : 4;
}

void scaled(void** p, unsigned block);
void summed(void** p, unsigned block);
static void more(void** p, unsigned block);

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                   void** parameters, void** extra) {
  if (threads_x != 128 || threads_y != 1 || threads_z != 1 || shared != 48) return 1;
  if (extra != NULL) return 2;
  Node node = {kernel, x * y * z, {0}, 0};
  const int count = kernel == (void*)scaled ? 6 : kernel == (void*)summed ? 7 : 3;
  for (int i = 0; i < count; ++i) memcpy(node.given + i, parameters[i], 8);
  return done_on(stream, &node);
}

int cuStreamCreate(void** stream, unsigned flags) {
  *stream = calloc(1, sizeof(Graph));
  return flags == 1 && *stream != NULL ? 0 : 5;
}

int cuStreamDestroy_v2(void* stream) {
  free(stream);
  return 0;
}

int cuStreamIsCapturing(void* stream, int* status) {
  *status = is_user_capturing;
  return stream == (void*)7 ? 0 : 6;
}

int cuStreamBeginCapture_v2(void* stream, int mode) {
  capture = stream;
  return mode == 2 ? 0 : 7;
}

int cuStreamEndCapture(void* stream, void** nodes) {
  *nodes = malloc(sizeof(Graph));
  memcpy(*nodes, stream, sizeof(Graph));
  capture = NULL;
  return 0;
}

int cuGraphInstantiateWithFlags(void** graph, void* nodes, unsigned long long flags) {
  *graph = malloc(sizeof(Graph));
  memcpy(*graph, nodes, sizeof(Graph));
  __atomic_fetch_add(&num_graphs, 1, __ATOMIC_RELAXED);
  return (int)flags;
}

int cuGraphDestroy(void* nodes) {
  free(nodes);
  return 0;
}

int cuGraphLaunch(void* graph, void* stream) {
  if (stream != (void*)7) return 8;
  __atomic_fetch_add(&num_graph_launches, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < ((Graph*)graph)->count; ++i) done(((Graph*)graph)->nodes + i);
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  static _Thread_local int own = 0;
  const int before = own;
  own = *mode;
  *mode = before;
  return 0;
}

int cuGraphExecDestroy(void* graph) {
  free(graph);
  __atomic_fetch_sub(&num_graphs, 1, __ATOMIC_RELAXED);
  return 0;
}

// Kernels: of pointers, a whole number of 32 bits and one of float32, and Triton's two rooms.

void scaled(void** p, unsigned block) {
  const float* x = *(const float**)p[0];
  float* out = *(float**)p[1];
  int count = *(int*)p[2];
  float factor = *(float*)p[3];
  if (*(void**)p[4] != NULL || *(void**)p[5] != NULL) return;
  for (int i = 16 * block; i < count && i < 16 * (int)block + 16; ++i) out[i] = x[i] * factor;
}

void summed(void** p, unsigned block) {
  const float *one = *(const float**)p[0], *other = *(const float**)p[1];
  float *total = *(float**)p[2], *out = *(float**)p[3];
  int count = *(int*)p[4];
  if (block != 0) return;
  for (int i = 0; i < count; ++i) {
    out[i] = one[i] + other[i];
    *total += out[i];
  }
}

static void more(void** p, unsigned block) {
  const float* total = *(const float**)p[0];
  float* out = *(float**)p[1];
  if (block != 0) return;
  for (long long i = 0; i < *(long long*)p[2]; ++i) out[i] += *total;
}

// As a function of CUDA C++ beside the kernels: it says what it does not take.
const char* added(const float* total, float* out, long long count, void* stream) {
  if (count > 1000) return "too many";
  void* given[] = {&total, &out, &count};
  return cuLaunchKernel(more, 1, 1, 1, 128, 1, 1, 48, stream, given, NULL) == 0 ? NULL : "not done";
}
