/* Small allocators with PyTorch's pluggable interface. Their addresses are fake and never accessed. Defining a name
   selects the allocator to build. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef void *stream_t;

/* Never returns the same address twice. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t next = 0x700000000000;
static size_t calls;

static void *take(size_t bytes) {
  pthread_mutex_lock(&lock);
  size_t address = next;
  next += (bytes + 511) / 512 * 512;
  calls++;
  pthread_mutex_unlock(&lock);
  return (void *)address;
}

#ifdef WELL_BEHAVED
void *my_malloc(size_t bytes, int device, stream_t stream) { return take(bytes); }
void my_free(void *address, size_t bytes, int device, stream_t stream) {}
#endif

/* The same, with function names that oomph does not search for. */
#ifdef OTHER_NAMES
void *borrow_alloc(size_t bytes, int device, stream_t stream) { return take(bytes); }
void borrow_free(void *address, size_t bytes, int device, stream_t stream) {}
#endif

/* Only alloc. The C library's free must not be used as its partner. */
#ifdef HALF_A_PAIR
void *alloc(size_t bytes, int device, stream_t stream) { return take(bytes); }
#endif

/* Every block begins before the last one ends. */
#ifdef OVERLAPPING
void *allocate(size_t bytes, int device, stream_t stream) {
  void *address = take(bytes);
  next -= 512;
  return address;
}
void deallocate(void *address, size_t bytes, int device, stream_t stream) {}
#endif

#ifdef ABORTING
void *allocate(size_t bytes, int device, stream_t stream) {
  if (calls == 20) {
    fprintf(stderr, "my pool is corrupt\n");
    abort();
  }
  return take(bytes);
}
void deallocate(void *address, size_t bytes, int device, stream_t stream) {}
#endif

/* Runs the statement HOW in the function IN: while loading, in the third alloc, or in the first call of any other
   function. */
#ifdef FAILING
#define LOAD 1
#define ALLOC 2
#define FREE 3
#define RESET 4
#define RESERVED 5
#define LIMIT 6
#ifndef IN
#define IN ALLOC
#endif
#ifndef HOW
#define HOW for (;;) pause()
#endif
static void go_wrong(int where) {
  if (where == IN) {
    HOW;
  }
}
__attribute__((constructor)) static void load(void) { go_wrong(LOAD); }
void *allocate(size_t bytes, int device, stream_t stream) {
  if (calls == 2) go_wrong(ALLOC);
  return take(bytes);
}
void deallocate(void *address, size_t bytes, int device, stream_t stream) { go_wrong(FREE); }
#if IN == RESET
void oomph_reset(void) { go_wrong(RESET); }
#elif IN == RESERVED
size_t oomph_reserved(int device) { go_wrong(RESERVED); return 0; }
#elif IN == LIMIT
void oomph_limit(int device, size_t bytes) { go_wrong(LIMIT); }
#endif
#endif

/* Fails after 20 blocks. */
#ifdef RUNNING_OUT
void *allocate(size_t bytes, int device, stream_t stream) { return calls == 20 ? NULL : take(bytes); }
void deallocate(void *address, size_t bytes, int device, stream_t stream) {}
#endif

/* Reports what it holds: whole 2 MiB pages per block. Fails if a free names another size, device or stream than the
   alloc did, or an unknown block. */
#ifdef STRICT
#define MOST 4096
static struct { void *address; size_t bytes; int device; stream_t stream; } live[MOST];
static size_t held;
static size_t pages(size_t bytes) { return (bytes + 0x1fffff) / 0x200000 * 0x200000; }
static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  abort();
}
void *alloc(size_t bytes, int device, stream_t stream) {
  for (int i = 0; i < MOST; i++) {
    if (live[i].address) continue;
    live[i].address = take(bytes);
    live[i].bytes = bytes;
    live[i].device = device;
    live[i].stream = stream;
    held += pages(bytes);
    return live[i].address;
  }
  return NULL;
}
/* Exported as free, a name that C reserves for another function. */
void give_back(void *address, size_t bytes, int device, stream_t stream) __asm__("free");
void give_back(void *address, size_t bytes, int device, stream_t stream) {
  for (int i = 0; i < MOST; i++) {
    if (!live[i].address || live[i].address != address) continue;
    if (live[i].bytes != bytes || live[i].device != device || live[i].stream != stream) fail("another block was meant");
    live[i].address = NULL;
    held -= pages(bytes);
    return;
  }
  fail("no such block");
}
size_t oomph_reserved(int device) { return held; }
#endif

/* Implements the record-stream function besides alloc and free, and no other. */
#ifdef STREAM_AWARE
void *allocate(size_t bytes, int device, stream_t stream) { return take(bytes); }
void deallocate(void *address, size_t bytes, int device, stream_t stream) {}
void oomph_record_stream(void *address, stream_t stream) {}
#endif

/* Implements the limit function and obeys it. */
#ifdef LIMIT_AWARE
static size_t held, most = -1;
void *allocate(size_t bytes, int device, stream_t stream) {
  if (held + bytes > most) return NULL;
  held += bytes;
  return take(bytes);
}
void deallocate(void *address, size_t bytes, int device, stream_t stream) { held -= bytes; }
size_t oomph_reserved(int device) { return held; }
void oomph_limit(int device, size_t bytes) { most = bytes / 2; }
#endif
