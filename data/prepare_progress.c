/* How far a pass of `prepare` is, a line every few seconds. */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "data/prepare_parts.h"

static const double every_s = 5;

void prepare_progress_begin(struct prepare_progress *g, const char *what, int64_t done, bool quiet) {
  const double now = clock_seconds();
  *g = (struct prepare_progress){.what = what, .began = now, .said = now, .begin = done, .quiet = quiet};
}

static void duration(double seconds, char text[32]) {
  if (seconds < 90)
    snprintf(text, 32, "%.0f s", seconds);
  else if (seconds < 5400)
    snprintf(text, 32, "%.0f min", seconds / 60);
  else
    snprintf(text, 32, "%.1f h", seconds / 3600);
}

void prepare_progress_say(struct prepare_progress *g, int64_t done, int64_t all, int64_t worked) {
  const double now = clock_seconds(), elapsed = now - g->began;
  if (g->quiet || now - g->said < every_s) return;
  g->said = now;
  char left[32] = "unknown";
  if (done > g->begin) duration(elapsed * (double)(all - done) / (double)(done - g->begin), left);
  log_info("%s: %.3f of %.3f GB (%.1f %%), %.1f MB/s, %s left", g->what, (double)done / 1e9, (double)all / 1e9,
           all > 0 ? 100 * (double)done / (double)all : 100, (double)worked / elapsed / 1e6, left);
}
