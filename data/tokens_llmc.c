/* Token files of llm.c: 256 words of i32, of which three mean something, then ids. */
#include <inttypes.h>

#include "data/frame.h"
#include "data/little_endian.h"
#include "data/tokens_parts.h"

enum { LLMC_HEADER = 1024 };

static const struct {
  uint32_t magic, version;
  int width;        /* 0: not tokens */
  const char *what; /* such a file is */
} kinds[] = {
    {20240520, 1, 2, "tokens of GPT-2's vocabulary"},
    {20240801, 7, 4, "tokens of Llama 3's vocabulary"},
    {20240522, 1, 0, "an evaluation file (HellaSwag)"},
    {20240326, 0, 0, "a model checkpoint"},
    {20240527, 0, 0, "a training state"},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

bool tokens_is_llmc(const unsigned char *bytes, int64_t count) {
  for (int k = 0; count >= 4 && k < KINDS; k++)
    if (load_u32(bytes) == kinds[k].magic) return true;
  return false;
}

bool tokens_open_llmc(struct tokens_file *f, struct error *e) {
  unsigned char header[12];
  if (f->size < LLMC_HEADER)
    return error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for llm.c's header of %d", f->path, f->size, LLMC_HEADER);
  if (!frame_read_at(f->fd, f->path, header, sizeof header, 0, e)) return false;
  const uint32_t magic = load_u32(header), version = load_u32(header + 4), count = load_u32(header + 8);
  int k = 0;
  while (k < KINDS && kinds[k].magic != magic) k++;
  if (k == KINDS)
    return error_set(e, ERROR_DATA, "%s: magic %" PRIu32 " (byte 0) is not one of llm.c's token files (%u, %u)", f->path, magic,
                     kinds[0].magic, kinds[1].magic);
  if (kinds[k].width == 0)
    return error_set(e, ERROR_DATA, "%s is llm.c's %s (magic %" PRIu32 "), not tokens to train on", f->path, kinds[k].what, magic);
  if (version != kinds[k].version)
    return error_set(e, ERROR_DATA, "%s: llm.c token file of version %" PRIu32 " (byte 4), with magic %" PRIu32 " only %" PRIu32 " is known",
                     f->path, version, magic, kinds[k].version);
  f->width = kinds[k].width;
  f->data_at = LLMC_HEADER;
  f->tokens = count;
  if (count > INT32_MAX || f->size - LLMC_HEADER != f->tokens * f->width)
    return error_set(e, ERROR_DATA, "%s: its header (byte 8) counts %" PRId32 " tokens, the file has %" PRId64 " bytes of them: %" PRId64 " ids of %d bytes",
                     f->path, (int32_t)count, f->size - LLMC_HEADER, (f->size - LLMC_HEADER) / f->width, f->width);
  return true;
}
