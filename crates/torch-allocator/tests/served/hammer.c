/* Loads an allocator as PyTorch does and stresses it: many threads, each on its own stream and on a shared one, with blocks
   used on both. Every live block is kept in a table; overlapping blocks end the program.
   usage: hammer LIBRARY THREADS ROUNDS */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef void *stream_t;
static void *(*allocate)(size_t, int, stream_t);
static void (*give_back)(void *, size_t, int, stream_t);
static void (*record_stream)(void *, stream_t);
static void (*reset)(void);
static size_t (*reserved)(int);

enum { BLOCKS = 64, MOST_THREADS = 64 };
struct block { char *address; size_t bytes; stream_t stream; };
static struct block live[MOST_THREADS][BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int threads, rounds;
static long served, refused;

static void fail(const char *what) {
  fprintf(stderr, "hammer: %s\n", what);
  _Exit(1);
}

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (!found) fail(dlerror());
  return found;
}

static void enter(struct block *place, struct block new) {
  pthread_mutex_lock(&lock);
  if ((size_t)new.address % 256) fail("a block is not aligned");
  for (int t = 0; t < threads; t++)
    for (int b = 0; b < BLOCKS; b++) {
      struct block *other = &live[t][b];
      if (other->address && new.address < other->address + other->bytes && other->address < new.address + new.bytes)
        fail("two live blocks overlap");
    }
  *place = new;
  served++;
  pthread_mutex_unlock(&lock);
}

static void leave(struct block *place) {
  pthread_mutex_lock(&lock);
  struct block old = *place;
  place->address = NULL;
  pthread_mutex_unlock(&lock);
  give_back(old.address, old.bytes, 0, old.stream);
}

static void *work(void *argument) {
  size_t thread = (size_t)argument;
  unsigned seed = 7 * thread + 1;
  for (int i = 0; i < rounds; i++) {
    struct block *place = &live[thread][rand_r(&seed) % BLOCKS];
    if (place->address) {
      if (rand_r(&seed) % 4 == 0) record_stream(place->address, (stream_t)0x5000);
      leave(place);
      continue;
    }
    struct block new = {NULL, 1 + rand_r(&seed) % (rand_r(&seed) % 8 ? 4096 : 4 << 20), NULL};
    new.stream = (stream_t)(rand_r(&seed) % 2 ? 0 : 0x1000 + 16 * thread);
    new.address = allocate(new.bytes, 0, new.stream);
    if (new.address) enter(place, new); else __atomic_add_fetch(&refused, 1, __ATOMIC_RELAXED);
    if (i % 1000 == 999) reset();
  }
  for (int b = 0; b < BLOCKS; b++)
    if (live[thread][b].address) leave(&live[thread][b]);
  return NULL;
}

int main(int count, char **arguments) {
  if (count != 4) fail("usage: hammer LIBRARY THREADS ROUNDS");
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror());
  allocate = symbol(library, "oomph_alloc");
  give_back = symbol(library, "oomph_free");
  record_stream = symbol(library, "oomph_record_stream");
  reset = symbol(library, "oomph_reset");
  reserved = symbol(library, "oomph_reserved");
  threads = atoi(arguments[2]);
  rounds = atoi(arguments[3]);
  pthread_t handles[MOST_THREADS];
  for (long t = 0; t < threads; t++) pthread_create(&handles[t], NULL, work, (void *)t);
  for (int t = 0; t < threads; t++) pthread_join(handles[t], NULL);
  reset();
  printf("served %ld refused %ld reserved %zu\n", served, refused, reserved(0));
  return 0;
}
