/* Files: whole reads, durable writes, folders. */
#ifndef FP4D_BASE_FILE_H
#define FP4D_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Reads a whole regular file; *text is malloc'ed, with a zero after the last
 * byte.  Refuses folders and files above `limit` bytes. */
bool file_read(const char *path, size_t limit, enum error_code code, char **text, size_t *bytes,
               struct error *e);

/* Publishes bytes under `path`, whole or not at all: PATH.tmp, write, fsync,
 * rename, fsync of the folder. */
bool file_publish(const char *path, const void *data, size_t bytes, enum error_code code, struct error *e);

/* fsync of a folder, so that a rename inside it is durable. */
bool file_sync_folder(const char *path, enum error_code code, struct error *e);

/* The same of the folder that holds `path`. */
bool file_sync_parent(const char *path, enum error_code code, struct error *e);

/* mkdir -p, durable: the parent of each folder that it makes is synced. */
bool file_make_folder(const char *path, enum error_code code, struct error *e);

/* The folder that holds `path`, made if it is absent. */
bool file_make_parent(const char *path, enum error_code code, struct error *e);

/* FOLDER-OF-FILE/NAME, or NAME where that is absolute; malloc'ed, NULL when out of memory. */
char *file_beside(const char *file, const char *name);

bool file_exists(const char *path);
/* Do both paths, of files that need not exist, name the same place?  False where a folder of theirs is absent. */
bool file_same_place(const char *a, const char *b);
int64_t file_size(const char *path); /* -1 if absent */

/* Removes a file or a folder with all in it; absent is fine. */
bool file_remove_tree(const char *path, enum error_code code, struct error *e);

#endif
