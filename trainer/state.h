/* Run state in and out of checkpoints.
 *
 * Every rank writes its share of the rows of every tensor (parameters or their
 * FP32 masters, AdamW moments); the counters, the divergence windows, the
 * configuration and the digests travel as the checkpoint's meta text.
 */
#ifndef FP4D_TRAINER_STATE_H
#define FP4D_TRAINER_STATE_H

#include "checkpoints/checkpoint.h"
#include "trainer/run.h"

enum { STATE_META_FORMAT = 2 }; /* of a checkpoint's meta text, docs/formats.md */

/* This rank's share, staged in the backend's host memory, whose pages are there from the
 * start, and who writes it; made once, at start-up. */
struct state;
struct state *state_open(struct run *run, struct error *e);
void state_close(struct state *s);

/* What compressing takes of a rank's host memory, beside the staging buffer, which has the
 * size of its share of a checkpoint. */
int64_t state_compressing_bytes(const struct config *c, int threads);

/* Begins to save after run->update (all ranks): copies into the staging buffer, and writes
 * it or, with checkpoint.async, has it written.  On failure older checkpoints stay. */
bool state_save(struct state *s, struct run *run, struct error *e);

/* To go on with that save: checkpoints/checkpoint.h. */
struct checkpoint_saver *state_saver(struct state *s);

/* Which checkpoint a start continues from. */
enum resume_kind { RESUME_AUTO, RESUME_NONE, RESUME_PATH };

/* Restores tensors and counters per `kind` ("auto": the newest whole one of the
 * run's folder, a fresh start if there is none at all).  *resumed tells whether
 * anything was restored.  Changed configuration keys are logged old -> new; what
 * makes it another model, or other samples (unless data.allow_change), is refused, as
 * is a value that is not finite. */
bool state_restore(struct run *run, enum resume_kind kind, const char *path, bool *resumed, struct error *e);

/* The parameters alone of what PATH means (state_find), whatever types they are stored in,
 * for a run that begins.  Said loudly.  All ranks. */
bool state_take_weights(struct run *run, const char *path, struct error *e);

/* Opens what PATH means: a step folder, a folder of steps or a run's folder
 * (then the newest whole one of it). */
struct checkpoint *state_find(const char *path, struct error *e);

/* The same on all ranks, who read what rank 0 found: a living run may publish
 * another one while they look. */
struct checkpoint *state_find_together(struct run *run, const char *path, struct error *e);

/* Parameters alone, for `eval` and `generate`, from an opened checkpoint. */
bool state_read_parameters(struct run *run, struct checkpoint *k, struct error *e);

/* Where that run stands: updates, samples, the detectors' windows. A changed
 * training stream is refused unless data.allow_change. */
bool state_read_counters(struct run *run, struct checkpoint *k, struct error *e);

/* The configuration that a checkpoint was written under, as YAML; malloc'ed. */
char *state_saved_config(const struct checkpoint *k, struct error *e);

/* Was it made by `import`?  Then it is of no run: it has no stream, samples, constants or
 * moments, and a start from it takes its parameters alone, whatever their type. */
bool state_imported(const struct checkpoint *k);

/* Where a run whose folder is `run_folder` keeps its checkpoints. */
void state_folder(const char *run_folder, char *text, int size);

#endif
