/* Monotonic seconds. */
#ifndef FP4D_BASE_CLOCK_H
#define FP4D_BASE_CLOCK_H

double clock_seconds(void);   /* monotonic, arbitrary origin */
double clock_wall(void);      /* seconds since 1970-01-01 UTC */

#endif
