/* "Did you mean …": the nearest of some known words. */
#ifndef FP4D_TRAINER_SUGGEST_H
#define FP4D_TRAINER_SUGGEST_H

/* A running search: start with {word, NULL, 0}, offer every candidate, read
 * `best` (NULL where none is near enough to be a likely slip). */
struct suggestion {
  const char *word;
  const char *best;
  int distance;
};
void suggest_offer(struct suggestion *s, const char *candidate);

#endif
