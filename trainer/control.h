/* Requests from outside: signals.
 *
 *   SIGUSR1            checkpoint now and go on
 *   SIGUSR2            checkpoint and leave with ERROR_PREEMPTED
 *   SIGTERM, SIGINT    the same as SIGUSR2, best effort
 *   SIGHUP             the same, unless the program was started ignoring it (nohup)
 *   SIGPIPE            ignored: a run outlives the reader of its log
 *
 * A handler only sets a flag.  The update loop combines the flags of all ranks
 * (control_take, then a bitwise or over ranks), so one rank receiving a signal
 * is enough and all ranks act at the same update.
 */
#ifndef FP4D_TRAINER_CONTROL_H
#define FP4D_TRAINER_CONTROL_H

#include <stdint.h>

#include "base/error.h"

/* CONTROL_SAVING is no request: a rank adds it that is busy with a checkpoint (trainer/saving.h). */
enum { CONTROL_CHECKPOINT = 1, CONTROL_STOP = 2, CONTROL_SAVING = 4 };

bool control_install(struct error *e);

/* This rank's requests since the last call. */
int64_t control_take(void);

#endif
