/* Files: whole reads, durable writes, folders.
 *
 * A file is published as every database does it: a temporary name in the same
 * folder, the bytes, fsync, rename, fsync of the folder.  A reader sees the
 * old file or the new one, also after a power cut.
 */
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int open_retry(const char *path, int flags, mode_t mode) {
  int fd;
  do {
    fd = open(path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

bool file_read(const char *path, size_t limit, enum error_code code, char **text, size_t *bytes,
               struct error *e) {
  int fd = open_retry(path, O_RDONLY | O_NONBLOCK, 0);
  if (fd < 0) return error_errno(e, code, "cannot open %s", path);
  struct stat st;
  char *buffer = NULL;
  if (fstat(fd, &st) != 0) {
    error_errno(e, code, "cannot examine %s", path);
    goto failed;
  }
  if (!S_ISREG(st.st_mode)) {
    error_set(e, code, "%s is %s, not a regular file", path, S_ISDIR(st.st_mode) ? "a folder" : "special");
    goto failed;
  }
  if ((uintmax_t)st.st_size > limit) {
    error_set(e, code, "%s has %lld bytes, more than the %zu allowed", path, (long long)st.st_size, limit);
    goto failed;
  }
  size_t size = (size_t)st.st_size, done = 0;
  buffer = malloc(size + 1);
  if (!buffer) {
    error_set(e, ERROR_SYSTEM, "out of memory reading the %zu bytes of %s", size, path);
    goto failed;
  }
  while (done < size) {
    ssize_t got = read(fd, buffer + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      error_errno(e, code, "cannot read %s", path);
      goto failed;
    }
    if (got == 0) break; /* it became shorter meanwhile: what is there now is the file */
    done += (size_t)got;
  }
  close(fd);
  buffer[done] = 0;
  *text = buffer;
  *bytes = done;
  return true;
failed:
  free(buffer);
  close(fd);
  return false;
}

bool file_sync_folder(const char *path, enum error_code code, struct error *e) {
  int fd = open_retry(path, O_RDONLY | O_DIRECTORY, 0);
  if (fd < 0) return error_errno(e, code, "cannot open folder %s", path);
  /* Some file systems have no fsync of folders and say EINVAL. */
  if (fsync(fd) != 0 && errno != EINVAL) {
    error_errno(e, code, "cannot sync folder %s", path);
    close(fd);
    return false;
  }
  close(fd);
  return true;
}

static bool write_all(int fd, const char *data, size_t bytes) {
  while (bytes) {
    ssize_t wrote = write(fd, data, bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return false;
    data += wrote;
    bytes -= (size_t)wrote;
  }
  return true;
}

/* The folder that holds `path`: "." for "x", "/" for "/x". */
static bool parent_of(const char *path, char folder[PATH_MAX], enum error_code code, struct error *e) {
  size_t length = strlen(path);
  if (length >= PATH_MAX) return error_set(e, code, "path too long: %s", path);
  while (length > 1 && path[length - 1] == '/') length--; /* FOLDER/ is FOLDER */
  memcpy(folder, path, length);
  folder[length] = 0;
  char *slash = strrchr(folder, '/');
  if (slash)
    slash[slash == folder] = 0;
  else
    strcpy(folder, ".");
  return true;
}

bool file_sync_parent(const char *path, enum error_code code, struct error *e) {
  char folder[PATH_MAX];
  return parent_of(path, folder, code, e) && file_sync_folder(folder, code, e);
}

bool file_make_parent(const char *path, enum error_code code, struct error *e) {
  char folder[PATH_MAX];
  return parent_of(path, folder, code, e) && file_make_folder(folder, code, e);
}

bool file_same_place(const char *a, const char *b) {
  char folder_a[PATH_MAX], folder_b[PATH_MAX];
  struct error none;
  struct stat x, y;
  const char *slash_a = strrchr(a, '/'), *slash_b = strrchr(b, '/');
  return strcmp(slash_a ? slash_a + 1 : a, slash_b ? slash_b + 1 : b) == 0 && parent_of(a, folder_a, ERROR_SYSTEM, &none) &&
         parent_of(b, folder_b, ERROR_SYSTEM, &none) && stat(folder_a, &x) == 0 && stat(folder_b, &y) == 0 && x.st_dev == y.st_dev &&
         x.st_ino == y.st_ino;
}

bool file_publish(const char *path, const void *data, size_t bytes, enum error_code code, struct error *e) {
  char temporary[PATH_MAX];
  int length = snprintf(temporary, sizeof temporary, "%s.tmp", path);
  if (length < 0 || (size_t)length >= sizeof temporary) return error_set(e, code, "path too long: %s", path);
  struct stat st;
  if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
    return error_set(e, code, "cannot write %s: it is %s", path,
                     S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  int fd = open_retry(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (fd < 0) return error_errno(e, code, "cannot create %s", temporary);
  if (!write_all(fd, data, bytes) || fsync(fd) != 0) {
    error_errno(e, code, "cannot write the %zu bytes of %s", bytes, temporary);
    close(fd);
    unlink(temporary);
    return false;
  }
  if (close(fd) != 0) {
    error_errno(e, code, "cannot close %s", temporary);
    unlink(temporary);
    return false;
  }
  if (rename(temporary, path) != 0) {
    error_errno(e, code, "cannot rename %s to %s", temporary, path);
    unlink(temporary);
    return false;
  }
  return file_sync_parent(path, code, e);
}

/* A folder that was just made outlives a power cut once its parent is synced.  A parent that may
 * be passed through but not read cannot be. */
static bool sync_made(const char *path, enum error_code code, struct error *e) {
  return file_sync_parent(path, code, e) || errno == EACCES;
}

bool file_make_folder(const char *path, enum error_code code, struct error *e) {
  char prefix[PATH_MAX];
  size_t length = strlen(path);
  if (length == 0) return error_set(e, code, "cannot make a folder without a name");
  if (length >= sizeof prefix) return error_set(e, code, "path too long: %s", path);
  for (size_t i = 1; i <= length; i++) {
    if (path[i] != '/' && path[i] != 0) continue;
    memcpy(prefix, path, i);
    prefix[i] = 0;
    if (mkdir(prefix, 0777) == 0) {
      if (!sync_made(prefix, code, e)) return false;
      continue;
    }
    if (errno == EEXIST) continue;
    /* EROFS, EACCES and the like also come for a folder that is there already. */
    int why = errno;
    struct stat st;
    if (stat(prefix, &st) == 0 && S_ISDIR(st.st_mode)) continue;
    errno = why;
    return error_errno(e, code, "cannot make folder %s", prefix);
  }
  struct stat st;
  if (stat(path, &st) != 0) return error_errno(e, code, "cannot examine %s", path);
  if (!S_ISDIR(st.st_mode)) return error_set(e, code, "%s is a file, not a folder", path);
  return true;
}

char *file_beside(const char *file, const char *name) {
  const char *slash = strrchr(file, '/');
  size_t folder = name[0] == '/' || !slash ? 0 : (size_t)(slash - file) + 1, length = strlen(name);
  char *path = malloc(folder + length + 1);
  if (!path) return NULL;
  memcpy(path, file, folder);
  memcpy(path + folder, name, length + 1);
  return path;
}

bool file_exists(const char *path) {
  struct stat st;
  return stat(path, &st) == 0;
}

int64_t file_size(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 ? (int64_t)st.st_size : -1;
}

/* Empties the folder open at `fd`, which it closes. */
static bool remove_children(int fd, const char *path, enum error_code code, struct error *e) {
  DIR *folder = fdopendir(fd);
  if (!folder) {
    error_errno(e, code, "cannot read folder %s", path);
    close(fd);
    return false;
  }
  bool ok = true;
  while (ok) {
    errno = 0;
    struct dirent *entry = readdir(folder);
    if (!entry) {
      if (errno) ok = error_errno(e, code, "cannot read folder %s", path);
      break;
    }
    const char *name = entry->d_name;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
    if (unlinkat(dirfd(folder), name, 0) == 0 || errno == ENOENT) continue;
    int why = errno;
    int child = openat(dirfd(folder), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (child < 0) {
      errno = why;
      ok = error_errno(e, code, "cannot remove %s/%s", path, name);
    } else if (!remove_children(child, path, code, e)) {
      ok = false;
    } else if (unlinkat(dirfd(folder), name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
      ok = error_errno(e, code, "cannot remove folder %s/%s", path, name);
    }
  }
  closedir(folder);
  return ok;
}

bool file_remove_tree(const char *path, enum error_code code, struct error *e) {
  if (unlink(path) == 0 || errno == ENOENT) return true;
  int why = errno;
  int fd = open_retry(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
  if (fd < 0) {
    errno = why;
    return error_errno(e, code, "cannot remove %s", path);
  }
  if (!remove_children(fd, path, code, e)) return false;
  if (rmdir(path) != 0 && errno != ENOENT) return error_errno(e, code, "cannot remove folder %s", path);
  return true;
}
