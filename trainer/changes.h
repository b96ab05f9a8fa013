/* What differs between two saved configurations. */
#ifndef FP4D_TRAINER_CHANGES_H
#define FP4D_TRAINER_CHANGES_H

/* Logs every key whose value differs, as "optimizer.lr: 0.003 -> 0.001"; both
 * texts are dumps (config_dump).  A route is one entry, called by its name. */
void changes_log(const char *was, const char *is);

#endif
