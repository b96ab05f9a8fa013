/* Does a checkpoint belong to a configuration? Tensors tell part of it by their
 * names and shapes; what they do not tell, the checkpoint's meta text does. */
#ifndef FP4D_TRAINER_MATCH_H
#define FP4D_TRAINER_MATCH_H

#include "base/hash.h"
#include "checkpoints/checkpoint.h"
#include "trainer/config.h"

/* `config` is a dump (config_dump).  A checkpoint without a configuration is
 * ERROR_CHECKPOINT. */

/* The same model: false with ERROR_CHECKPOINT that lists every key that differs.
 * Heads of another width have tensors of the same shape, and a deeper model holds
 * a shallower one's, so this comes before any tensor is read. */
bool match_model(const struct checkpoint *k, const char *config, struct error *e);

/* Parameters and masters in the same types: a resume needs what the checkpoint holds. */
bool match_precision(const struct checkpoint *k, const char *config, struct error *e);

/* The same samples: false with ERROR_DATA where sample i of the run would be
 * other tokens of the stream.  With `allowed` that is a warning, if `speak`. */
bool match_samples(const struct checkpoint *k, const char *config, bool allowed, bool speak, struct error *e);

/* The same training stream, by its content: false with ERROR_DATA for another one at
 * `path`.  With `allowed` that is a warning, if `speak`. */
bool match_stream(const struct checkpoint *k, const char *path, struct hash digest, bool allowed, bool speak, struct error *e);

/* The same constants of the route's arithmetic (trainer/constants.h): false with
 * ERROR_CHECKPOINT that names those that changed. */
bool match_constants(const struct checkpoint *k, const struct config *c, struct error *e);

/* Warns of what makes a result another than the trained model's: the other
 * keys of the model, and the route. */
void match_warn(const struct checkpoint *k, const char *config);

#endif
