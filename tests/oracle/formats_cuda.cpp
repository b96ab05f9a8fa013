// Golden checksums of number formats, from the host functions of CUDA's own
// headers (cuda_fp4.h, cuda_fp8.h): every pattern, NaN and saturation included.
//
//   g++ -O2 -I$CUDA_HOME/include tests/oracle/formats_cuda.cpp -o formats_cuda
//   ./formats_cuda >> tests/golden/formats.txt
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <cuda_fp4.h>
#include <cuda_fp8.h>

static uint32_t crc_byte(uint32_t crc, uint8_t byte) {
  crc ^= byte;
  for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1u)));
  return crc;
}

static float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static uint8_t e2m1(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
static uint8_t e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
static uint8_t e5m2(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }
// scales are magnitudes: the sign is cleared first
static uint8_t e8m0_up(float x) { return __nv_cvt_float_to_e8m0(__builtin_fabsf(x), __NV_SATFINITE, cudaRoundPosInf); }
static uint8_t e8m0_floor(float x) { return __nv_cvt_float_to_e8m0(__builtin_fabsf(x), __NV_SATFINITE, cudaRoundZero); }

int main() {
  struct {
    const char *name;
    uint8_t (*encode)(float);
  } formats[] = {{"e2m1", e2m1}, {"e4m3", e4m3}, {"e5m2", e5m2}, {"e8m0_up", e8m0_up}, {"e8m0_floor", e8m0_floor}};
  for (auto &f : formats) {
    uint32_t crc = ~0u;
    for (uint32_t i = 0; i < 65536; i++) crc = crc_byte(crc, f.encode(from_bits(i << 16)));
    std::printf("cuda_%s_bf16 %08x\n", f.name, ~crc);
    crc = ~0u;
    for (uint32_t i = 0; i < 1u << 20; i++) crc = crc_byte(crc, f.encode(from_bits(i * 2654435761u)));
    std::printf("cuda_%s_f32 %08x\n", f.name, ~crc);
  }
}
