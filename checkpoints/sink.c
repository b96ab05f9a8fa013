#include "checkpoints/sink.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct sink_info {
  int *failure;
};

struct sink {
  H5FD_t public; /* HDF5's part; must be first */
  int fd;
  haddr_t allocated, end; /* as the library sees the file; its true end */
  int *failure;
};

static void failed(struct sink *s) {
  if (*s->failure == 0) *s->failure = errno;
}

static H5FD_t *sink_open(const char *name, unsigned flags, hid_t access, haddr_t most) {
  const struct sink_info *info = H5Pget_driver_info(access);
  struct sink *s = calloc(1, sizeof *s);
  (void)most;
  if (!info || !s || !(flags & H5F_ACC_TRUNC)) {
    free(s);
    return NULL;
  }
  s->failure = info->failure;
  s->fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (s->fd >= 0) return &s->public;
  failed(s);
  free(s);
  return NULL;
}

static herr_t sink_close(H5FD_t *file) {
  struct sink *s = (struct sink *)(void *)file;
  if (*s->failure == 0 && fsync(s->fd) != 0) failed(s);
  if (close(s->fd) != 0) failed(s);
  free(s);
  return 0;
}

static herr_t sink_query(const H5FD_t *file, unsigned long *flags) {
  (void)file;
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
           H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

static haddr_t sink_get_eoa(const H5FD_t *file, H5FD_mem_t type) {
  (void)type;
  return ((const struct sink *)(const void *)file)->allocated;
}

static herr_t sink_set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t at) {
  (void)type;
  ((struct sink *)(void *)file)->allocated = at;
  return 0;
}

static haddr_t sink_get_eof(const H5FD_t *file, H5FD_mem_t type) {
  (void)type;
  return ((const struct sink *)(const void *)file)->end;
}

static herr_t sink_read(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t bytes, void *to) {
  struct sink *s = (struct sink *)(void *)file;
  char *p = to;
  (void)type, (void)transfer;
  while (bytes > 0) {
    ssize_t n = pread(s->fd, p, bytes, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) failed(s);
    if (n <= 0) break;
    p += n;
    at += (haddr_t)n;
    bytes -= (size_t)n;
  }
  memset(p, 0, bytes); /* not written yet */
  return 0;
}

static herr_t sink_write(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t bytes, const void *from) {
  struct sink *s = (struct sink *)(void *)file;
  const char *p = from;
  (void)type, (void)transfer;
  if (at + bytes > s->end) s->end = at + bytes;
  while (bytes > 0 && *s->failure == 0) {
    ssize_t n = pwrite(s->fd, p, bytes, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      failed(s);
      break;
    }
    p += n;
    at += (haddr_t)n;
    bytes -= (size_t)n;
  }
  return 0;
}

static herr_t sink_truncate(H5FD_t *file, hid_t transfer, hbool_t closing) {
  struct sink *s = (struct sink *)(void *)file;
  (void)transfer, (void)closing;
  if (*s->failure == 0 && s->end != s->allocated && ftruncate(s->fd, (off_t)s->allocated) != 0) failed(s);
  s->end = s->allocated;
  return 0;
}

/* No lock is taken (the run's folder has its own), but HDF5 marks a file as being
 * written only where its driver has this call. */
static herr_t sink_lock(H5FD_t *file, hbool_t write) {
  (void)file, (void)write;
  return 0;
}

static herr_t sink_unlock(H5FD_t *file) {
  (void)file;
  return 0;
}

static const H5FD_class_t driver_class = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = 511, /* of the range for private drivers */
#endif
    .name = "fp4d-sink",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(struct sink_info),
    .open = sink_open,
    .close = sink_close,
    .query = sink_query,
    .get_eoa = sink_get_eoa,
    .set_eoa = sink_set_eoa,
    .get_eof = sink_get_eof,
    .read = sink_read,
    .write = sink_write,
    .truncate = sink_truncate,
    .lock = sink_lock,
    .unlock = sink_unlock,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static hid_t driver = H5I_INVALID_HID;

static void register_driver(void) { driver = H5FDregister(&driver_class); }

bool sink_set(hid_t access, int *failure) {
  struct sink_info info = {failure};
  *failure = 0;
  pthread_once(&driver_once, register_driver);
  return driver >= 0 && H5Pset_driver(access, driver, &info) >= 0;
}
