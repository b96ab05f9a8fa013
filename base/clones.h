/* Loops for each instruction set.
 *
 * CLONES before a function compiles it once per x86-64 level; the one that fits
 * is chosen at load time, by level: a processor's name ("arch=haswell") would
 * match that model alone.  The bits are the same in all where only
 * + - * / sqrt and explicit fma are used.  Sanitizers are not ready yet when it
 * is chosen. */
#ifndef FP4D_BASE_CLONES_H
#define FP4D_BASE_CLONES_H

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#endif
