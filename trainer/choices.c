#include "trainer/choices.h"

#include <string.h>

#include "base/log.h"
#include "trainer/record.h"

static void take(void *object, const char *contraction, const char *choice) { record_text(object, contraction, choice); }

json_t *choices_object(const struct device *d) {
  if (!d->k->choices) return NULL;
  json_t *o = json_object();
  d->k->choices(d, take, o);
  return o;
}

void choices_compare(const json_t *before, const json_t *now) {
  const char *first = NULL, *key;
  json_t *is;
  int changed = 0, all = 0;
  json_object_foreach((json_t *)(uintptr_t)now, key, is) {
    const char *was = json_string_value(json_object_get(before, key));
    all += was != NULL;
    if (!was || strcmp(was, json_string_value(is)) == 0) continue;
    if (changed++ == 0) first = key;
  }
  if (changed > 0)
    log_warning("%d of %d contractions are computed otherwise than before this start, as %s: %s, before %.500s; from here on updates are close to those of a run that was not stopped, not the same to the bit",
                changed, all, first, json_string_value(json_object_get(now, first)), json_string_value(json_object_get(before, first)));
}
