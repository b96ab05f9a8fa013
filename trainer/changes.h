/* What differs between two saved configurations. */
#ifndef FP4D_TRAINER_CHANGES_H
#define FP4D_TRAINER_CHANGES_H

/* Calls `line` with every key whose value differs, and "optimizer.lr: 0.003 -> 0.001";
 * both texts are dumps (config_dump).  A route is one entry, called by its name. */
void changes_list(const char *was, const char *is, void (*line)(void *context, const char *key, const char *text),
                  void *context);

/* Logs them, as changes since the checkpoint. */
void changes_log(const char *was, const char *is);

#endif
