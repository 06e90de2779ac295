// Those functions of CUDA's driver that a replay calls, with kernels that are functions of C.

#include <stddef.h>
#include <string.h>

static int num_launches = 0;
static void* context = (void*)1;

int launches_so_far(void) { return num_launches; }

void set_context(void* value) { context = value; }

int cuCtxGetCurrent(void** found) {
  *found = context;
  return 0;
}

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t count, void* stream) {
  memset((void*)to, value, count);
  return 0;
}

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                   void** parameters, void** extra) {
  if (threads_x != 128 || threads_y != 1 || threads_z != 1 || shared != 48) return 1;
  if (extra != NULL || stream != (void*)7) return 2;
  ++num_launches;
  for (unsigned block = 0; block < x * y * z; ++block)
    ((void (*)(void**, unsigned))kernel)(parameters, block);
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

// As a function of CUDA C++ beside the kernels: it says what it does not take.
const char* added(const float* total, float* out, long long count, void* stream) {
  if (count > 1000) return "too many";
  for (long long i = 0; i < count; ++i) out[i] += *total;
  return NULL;
}
