/* kernels/sm90/ptx.h as inline PTX.  What each function does stands there. */
#ifndef FP4D_KERNELS_SM90_PTX_DEVICE_H
#define FP4D_KERNELS_SM90_PTX_DEVICE_H

#include <cuda.h>
#include <stdint.h>

#define SM90_DEVICE static __device__ __forceinline__

SM90_DEVICE uint32_t sm90_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
SM90_DEVICE void sm90_fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- barriers ---------------------------------------------------------------- */
SM90_DEVICE void sm90_barrier_init(uint64_t *b, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sm90_shared(b)), "r"(count) : "memory");
}
SM90_DEVICE void sm90_barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
SM90_DEVICE void sm90_barrier_expect(uint64_t *b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm90_shared(b)), "r"(bytes) : "memory");
}
SM90_DEVICE void sm90_barrier_arrive(uint64_t *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm90_shared(b)) : "memory");
}
SM90_DEVICE void sm90_barrier_wait(uint64_t *b, uint32_t parity) {
  uint32_t at = sm90_shared(b), done;
  do asm volatile("{\n\t.reg .pred p;\n\t"
                  "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                  "selp.b32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
  while (!done);
}

/* ---- TMA --------------------------------------------------------------------- */
SM90_DEVICE void sm90_tma_load_2d(void *to, const CUtensorMap *map, uint64_t *b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(sm90_shared(to)), "l"(map), "r"(sm90_shared(b)), "r"(x), "r"(y) : "memory");
}
SM90_DEVICE void sm90_tma_load_3d(void *to, const CUtensorMap *map, uint64_t *b, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(sm90_shared(to)), "l"(map), "r"(sm90_shared(b)), "r"(x), "r"(y), "r"(z) : "memory");
}
SM90_DEVICE void sm90_tma_store_2d(const CUtensorMap *map, const void *from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(sm90_shared(from)), "r"(x), "r"(y) : "memory");
}
SM90_DEVICE void sm90_tma_store_3d(const CUtensorMap *map, const void *from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(map), "r"(sm90_shared(from)), "r"(x), "r"(y), "r"(z) : "memory");
}
SM90_DEVICE void sm90_bulk_load(void *to, const void *from, uint64_t *b, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(sm90_shared(to)), "l"(from), "r"(bytes), "r"(sm90_shared(b)) : "memory");
}
SM90_DEVICE void sm90_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> SM90_DEVICE void sm90_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> SM90_DEVICE void sm90_bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

/* ---- others ------------------------------------------------------------------ */
template <int R> SM90_DEVICE void sm90_registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> SM90_DEVICE void sm90_registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }
SM90_DEVICE void sm90_named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
SM90_DEVICE void sm90_named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
SM90_DEVICE uint32_t sm90_transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
SM90_DEVICE uint32_t sm90_bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
SM90_DEVICE float sm90_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* ---- wgmma ------------------------------------------------------------------- */
SM90_DEVICE void sm90_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SM90_DEVICE void sm90_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> SM90_DEVICE void sm90_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int R> SM90_DEVICE void sm90_wgmma_registers(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> SM90_DEVICE void sm90_wgmma_registers(uint32_t (&a)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(a[i])::"memory");
}

/* Lists of accumulator registers in the text of an instruction and as its operands. */
#define SM90_TEXT_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_REGISTERS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SM90_TEXT_96 SM90_TEXT_64 ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SM90_REGISTERS_96 SM90_REGISTERS_64, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define SM90_TEXT_128 SM90_TEXT_96 ", " "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_REGISTERS_128 SM90_REGISTERS_96, \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define SM90_TEXT_256 SM90_TEXT_128 ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SM90_REGISTERS_256 SM90_REGISTERS_128, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

/* `o0`..: the operands behind the accumulators. */
#define SM90_WGMMA_SS(n, o0, o1, o2, o3, o4)                                                              \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #o2 ", 0;\n\t"                                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SM90_TEXT_##n "}, "           \
               "%" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";\n\t}"                                    \
               : SM90_REGISTERS_##n : "l"(a), "l"(b), "r"((int)accumulate), "n"(TransposeA ? 1 : 0), "n"(TransposeB ? 1 : 0))
#define SM90_WGMMA_RS(n, o0, o1, o2, o3, o4, o5, o6)                                                      \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #o5 ", 0;\n\t"                                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" SM90_TEXT_##n "}, "           \
               "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";\n\t}"              \
               : SM90_REGISTERS_##n                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(TransposeB ? 1 : 0))

template <int N, bool TransposeA, bool TransposeB>
SM90_DEVICE void sm90_wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 96 || N == 128 || N == 256, "N of a product");
  if constexpr (N == 64) SM90_WGMMA_SS(64, 32, 33, 34, 35, 36);
  if constexpr (N == 96) SM90_WGMMA_SS(96, 48, 49, 50, 51, 52);
  if constexpr (N == 128) SM90_WGMMA_SS(128, 64, 65, 66, 67, 68);
  if constexpr (N == 256) SM90_WGMMA_SS(256, 128, 129, 130, 131, 132);
}

template <int N, bool TransposeB>
SM90_DEVICE void sm90_wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 96 || N == 128 || N == 256, "N of a product");
  if constexpr (N == 64) SM90_WGMMA_RS(64, 32, 33, 34, 35, 36, 37, 38);
  if constexpr (N == 96) SM90_WGMMA_RS(96, 48, 49, 50, 51, 52, 53, 54);
  if constexpr (N == 128) SM90_WGMMA_RS(128, 64, 65, 66, 67, 68, 69, 70);
  if constexpr (N == 256) SM90_WGMMA_RS(256, 128, 129, 130, 131, 132, 133, 134);
}

#undef SM90_WGMMA_SS
#undef SM90_WGMMA_RS

#endif
