/* What attention's boundaries publish: views of the rotated qkv, and of dO. */
#include "kernels/attention.h"
#include "kernels/cpu/attention.h"

void attention_publish(struct device *d, const struct attention_payload *payload, struct quantise_counts *counts,
                       const struct matrix *qkv, const struct attention_shape *s) {
  (void)d, (void)counts, (void)qkv, (void)s;
  CPU_REQUIRE(attention_plain(&payload->formats), "refused formats");
}

void cpu_attention_gradient(struct device *d, const struct attention_gradient *g, struct quantise_counts *counts,
                            const struct matrix *d_out, const struct matrix *out, const float *lse,
                            const struct attention_formats *formats, const struct attention_shape *s) {
  (void)d, (void)g, (void)counts, (void)d_out, (void)out, (void)lse, (void)s;
  CPU_REQUIRE(attention_format_plain(formats->d_out), "refused formats");
}
