# fp4d: build, demo, tests.  `make help` lists the targets.
#
# A build lives wholly under build/ (BUILD=...).  Where nvcc is found (NVCC=..., CUDA's
# usual folder, PATH) it has the CUDA backends, else it is CPU-only; NVCC= asks for that.
#   make SANITIZE=1          address and undefined-behaviour sanitizers, build/asan
#   make SANITIZE=thread     the race detector, build/tsan (slow: not part of check)
#   make CHECKER=memcheck check-gpu  … under compute-sanitizer's memcheck, racecheck, synccheck or initcheck
#   make CROSS=aarch64 unit  base and kernels for aarch64, tests under qemu-user

BUILD    ?= build
JOBS     ?= $(shell nproc)
CC        = gcc
AR        = gcc-ar
CSTD      = -std=c17 -D_GNU_SOURCE
WARNINGS  = -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
# Numerics: no contraction, no fast-math; errno and traps are not looked at.
NUMERICS  = -ffp-contract=off -fno-math-errno -fno-trapping-math
OPTIMISE  = -O3 -g
CFLAGS    = $(CSTD) $(WARNINGS) $(NUMERICS) $(OPTIMISE) -I. -pthread
LDLIBS    = -pthread -lm

# make V=1 prints whole commands
Q          = $(if $(V),,@)
SAY        = @$(if $(V),:,echo) ' '

ROOMS     = base kernels kernels/cpu comm data model checkpoints trainer

ifeq ($(SANITIZE),1)
override BUILD := $(BUILD)/asan
# No clones by instruction set here, so FMA is asked for: without it every fma is a call.
OPTIMISE   = -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined \
             $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
LDLIBS    += -fsanitize=address,undefined
endif

ifeq ($(SANITIZE),thread)
override BUILD := $(BUILD)/tsan
OPTIMISE   = -O1 -g -fno-omit-frame-pointer -fsanitize=thread $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
LDLIBS    += -fsanitize=thread
# Its shadow memory wants addresses that are not random.
RUNNER     = setarch -R
endif

ifeq ($(CROSS),aarch64)
override BUILD := $(BUILD)/aarch64
CC         = aarch64-linux-gnu-gcc
AR         = aarch64-linux-gnu-gcc-ar
# xxhash.h is one header for every machine; Debian puts it in the native folder.
CFLAGS    += -isystem $(BUILD)/include
ROOMS      = base kernels kernels/cpu
RUNNER     = qemu-aarch64-static -L /usr/aarch64-linux-gnu
else
PKGS       = hdf5-serial yaml-0.1 jansson zlib libzstd libpcre2-8
CFLAGS    += $(shell pkg-config --cflags $(PKGS) ompi-c 2>/dev/null | sed 's/-I\//-isystem \//g')
LDLIBS    += $(shell pkg-config --libs $(PKGS) ompi-c 2>/dev/null)
endif

# ---- CUDA: found once; sanitized and cross builds are CPU-only -------------------------
NVCC      ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc))
CUDA      := $(if $(SANITIZE)$(CROSS),,$(NVCC))
ifneq ($(CUDA),)
CUDA_HOME  = $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(CUDA))))
ROOMS     += kernels/cuda
# Numerics as for the CPU: no contraction, correctly rounded quotients and roots, subnormals kept.
NVCCFLAGS  = -std=c++17 -O3 --fmad=false -prec-div=true -prec-sqrt=true -ftz=false -Xcompiler -Wall,-Wextra -Xcompiler -fno-exceptions,-fno-rtti,-fno-threadsafe-statics \
             -lineinfo -I. -MMD -MP
CHECKER   ?=
$(if $(filter-out memcheck racecheck synccheck initcheck,$(CHECKER))$(word 2,$(CHECKER)),$(error CHECKER=$(CHECKER) is not memcheck, racecheck, synccheck or initcheck))
ifeq ($(CHECKER),racecheck)
# It sees a barrier's order for the thread alone that arrives (kernels/sm90/ptx.h).
override BUILD := $(patsubst %/racecheck,%,$(BUILD))/racecheck
NVCCFLAGS += -DFP4D_EVERY_LANE_ARRIVES
endif
SM90       = -gencode arch=compute_90a,code=sm_90a
SM100      = -gencode arch=compute_100a,code=sm_100a
CFLAGS_kernels_device = -DFP4D_CUDA
CFLAGS_kernels_cuda_libraries = -isystem $(CUDA_HOME)/include -DFP4D_CUDA_HOME='"$(CUDA_HOME)"'
CFLAGS_kernels_cuda_probe = -isystem $(CUDA_HOME)/include
CUDA_OBJECTS = $(patsubst %.cu,$(BUILD)/%.o,$(wildcard kernels/cuda/*.cu kernels/sm90/*.cu kernels/sm100/*.cu))
LDLIBS    += -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt
endif

VERSION   := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
SOURCES    = $(filter-out trainer/main.c,$(wildcard $(addsuffix /*.c,$(ROOMS))))
OBJECTS    = $(SOURCES:%.c=$(BUILD)/%.o) $(CUDA_OBJECTS)
LIBRARY    = $(BUILD)/libfp4d.a
PROGRAM    = $(BUILD)/fp4d

# Unit tests: tests/ROOM_SUBJECT_test.c needs only the rooms up to ROOM.
UNIT_C     = $(filter $(foreach r,$(notdir $(ROOMS)),tests/$(r)_%_test.c),$(wildcard tests/*_test.c))
UNITS      = $(UNIT_C:tests/%.c=$(BUILD)/tests/%) $(MODEL_UNITS)

# Tests of the CUDA kernels, tests/{cuda,sm90}_SUBJECT_test.cu: the kernels' own sources compiled
# for the host model of CUDA (kernels/cuda/model/fibers.h), which needs neither nvcc nor a GPU.
ifeq ($(SANITIZE)$(CROSS),)
MODEL_UNITS   = $(patsubst tests/%.cu,$(BUILD)/model/tests/%,$(filter-out tests/cuda_large_test.cu,$(wildcard tests/cuda_*_test.cu tests/sm90_*_test.cu)))
MODEL_SOURCES = $(filter-out kernels/cuda/gemm.cu,$(wildcard kernels/cuda/*.cu kernels/sm90/*.cu kernels/cuda/model/*.cpp kernels/sm90/*.cpp))
# The model's own list of backends among them: the library's has none for CUDA where there is no nvcc.
MODEL_OBJECTS = $(BUILD)/model/kernels/device.o $(addprefix $(BUILD)/model/,$(addsuffix .o,$(basename $(MODEL_SOURCES))))
endif
# A GPU has them too (make check-gpu), but for those of the model itself, and one for its memory's size.
GPU_TESTS  = $(patsubst tests/%.cu,$(BUILD)/gpu/%,$(filter-out tests/cuda_model_test.cu tests/cuda_device_test.cu tests/cuda_refusals_test.cu,$(wildcard tests/cuda_*_test.cu tests/sm90_*_test.cu)))
CXX        = g++
MODELFLAGS = -std=c++17 -D_GNU_SOURCE -DFP4D_CUDA_MODEL -Wall -Wextra -Wconversion -Wshadow -Werror -Wno-unknown-pragmas $(NUMERICS) -O2 -g \
             -fsanitize=undefined -fno-sanitize-recover=undefined $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3) -I. -pthread

# One rank of the worlds that tests/*_test.py launch with mpirun: tests/*_main.c.
WORLDS     = $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/*_main.c))

.PHONY: gpu-tests check-gpu all lib plugin help units unit worlds bench-gemm bench-quantise bundle deps demo check clean
ifeq ($(CROSS),aarch64)
all: lib
else
all: $(PROGRAM) plugin
endif
lib: $(LIBRARY)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile | expand -t 20
	@sed -n 's/^# *\(make [A-Z].*\)/\1/p' Makefile

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	$(SAY) AR $@
	$(Q)$(AR) rcs $@ $^

$(PROGRAM): $(BUILD)/trainer/main.o $(LIBRARY)
	$(SAY) "LD $@$(if $(CUDA),, without CUDA$(if $(SANITIZE),,: no nvcc was found (NVCC=PATH)))"
	$(Q)$(CC) -o $@ $^ $(LDLIBS)

# HDF5's zstd filter for h5py, h5dump and h5repack (HDF5_PLUGIN_PATH=build/plugins); never loaded by fp4d.
PLUGIN     = $(BUILD)/plugins/libfp4d_zstd.so
plugin: $(PLUGIN) ## the HDF5 plugin that lets h5py and h5dump read checkpoints
$(PLUGIN): checkpoints/plugin/fp4d_zstd.c checkpoints/zstd_filter.c checkpoints/zstd_filter.h Makefile
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(filter-out -fsanitize% -march=%,$(CFLAGS)) -fPIC -shared -o $@ $(filter %.c,$^) $(shell pkg-config --libs libzstd)

$(BUILD)/%.o: %.c Makefile | $(BUILD)/include/xxhash.h
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(CC) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -MMD -MP -c -o $@ $<

$(BUILD)/trainer/version.o: CFLAGS += -DFP4D_VERSION='"$(VERSION)"'
$(BUILD)/trainer/version.o: $(if $(filter $(VERSION),$(file <$(BUILD)/version)),,force)
.PHONY: force
force:
	@mkdir -p $(BUILD); printf '%s' '$(VERSION)' > $(BUILD)/version

# Which backends there are: anew when nvcc came or went.
$(BUILD)/kernels/device.o: $(if $(filter with:$(CUDA),$(file <$(BUILD)/cuda)),,force-cuda)
.PHONY: force-cuda
force-cuda:
	@mkdir -p $(BUILD); printf '%s' 'with:$(CUDA)' > $(BUILD)/cuda

$(BUILD)/include/xxhash.h:
	@mkdir -p $(@D)
	$(if $(PKGS),@pkg-config --exists $(PKGS) ompi-c || { echo "libraries are missing ($(PKGS) ompi-c): run 'make deps'"; exit 1; })
	@cp /usr/include/xxhash.h $@ 2>/dev/null || { echo "xxhash.h is missing: run 'make deps'"; exit 1; }

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(LIBRARY)
	$(SAY) LD $@
	$(Q)$(CC) -o $@ $^ $(LDLIBS)

# CUDA sources: for the GPUs by nvcc, for the host model by g++.
$(BUILD)/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(SAY) NVCC $<
	$(Q)$(CUDA) $(NVCCFLAGS) $(if $(filter kernels/sm90/%,$<),$(SM90),$(if $(filter kernels/sm100/%,$<),$(SM100),$(SM90) $(SM100))) -c -o $@ $<

$(BUILD)/model/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(SAY) CXX $< for the host model
	$(Q)$(CXX) -x c++ $(MODELFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/model/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(SAY) CXX $<
	$(Q)$(CXX) $(MODELFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/model/tests/%: $(BUILD)/model/tests/%.o $(MODEL_OBJECTS) $(LIBRARY)
	$(SAY) LD $@
	$(Q)$(CXX) -fsanitize=undefined -o $@ $^ $(LDLIBS)

# The whole program on the host model: its GPU is one of sm_90a, or of sm_100a, whichever is asked for.
MODEL_PROGRAM = $(BUILD)/model/fp4d
$(BUILD)/model/kernels/device.o: kernels/device.c Makefile
	@mkdir -p $(@D)
	$(SAY) CC $< for the host model
	$(Q)$(CC) $(CFLAGS) -DFP4D_CUDA -DFP4D_CUDA_MODEL -MMD -MP -c -o $@ $<

$(MODEL_PROGRAM): $(BUILD)/trainer/main.o $(MODEL_OBJECTS) $(LIBRARY)
	$(SAY) LD $@
	$(Q)$(CXX) -fsanitize=undefined -o $@ $^ $(LDLIBS)

# Worlds of the host model's GPUs: the same programs as on GPUs.
$(BUILD)/model/tests/%_main: $(BUILD)/tests/%_main.o $(MODEL_OBJECTS) $(LIBRARY)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CXX) -fsanitize=undefined -o $@ $^ $(LDLIBS)

$(BUILD)/gpu/%.o: tests/%.cu Makefile
	@mkdir -p $(@D)
	$(SAY) NVCC $<
	$(Q)$(CUDA) $(NVCCFLAGS) $(SM90) -c -o $@ $<

$(BUILD)/gpu/%: $(BUILD)/gpu/%.o $(LIBRARY)
	$(SAY) LD $@
	$(Q)$(CXX) -o $@ $^ $(LDLIBS)

gpu-tests: $(GPU_TESTS)
check-gpu: ## the CUDA backend's tests on this machine's GPU (sm_90a)
	@$(if $(CUDA),,echo "no nvcc was found (NVCC=PATH): there is no CUDA backend to test" >&2; exit 69)
	@$(MAKE) -j$(JOBS) --no-print-directory all gpu-tests $(BUILD)/tests/comm_link_main
	@BUILD=$(BUILD) CHECKER=$(CHECKER) CUDA_HOME=$(CUDA_HOME) tests/check_gpu

.SECONDARY: $(GPU_TESTS:%=%.o) $(UNITS:%=%.o) $(WORLDS:%=%.o) $(MODEL_OBJECTS)
units: $(UNITS) $(if $(MODEL_UNITS),$(MODEL_PROGRAM))
unit: $(UNITS) ## run the unit tests of this build
	@LSAN_OPTIONS=suppressions=$(CURDIR)/tests/lsan.supp:print_suppressions=0 tests/run $(if $(RUNNER),--with '$(RUNNER)') $(UNITS)

worlds: $(WORLDS) $(if $(MODEL_UNITS),$(BUILD)/model/tests/comm_link_main)
$(BUILD)/tests/checkpoints_save_test: LDLIBS += -Wl,--wrap=rename
$(BUILD)/tests/trainer_masked_main: LDLIBS += -Wl,--wrap=data_sample
$(BUILD)/tests/trainer_waits_main: LDLIBS += -Wl,--wrap=device_open_rank
$(BUILD)/tests/trainer_overlap_main: LDLIBS += -Wl,--wrap=device_open_rank,--wrap=comm_reduce_scatter_begin,--wrap=comm_all_gather_begin,--wrap=comm_finish,--wrap=comm_finish_all
$(BUILD)/tests/trainer_overtaken_main: LDLIBS += -Wl,--wrap=manifest_read

# OpenBLAS is only what this benchmark compares with.
$(BUILD)/tests/bench_gemm.o: CFLAGS += $(shell pkg-config --cflags openblas | sed 's/-I\//-isystem \//g')
$(BUILD)/tests/bench_gemm: LDLIBS += $(shell pkg-config --libs openblas)
bench-gemm: $(BUILD)/tests/bench_gemm ## the CPU contraction beside OpenBLAS (libopenblas-dev)
	@env -u OPENBLAS_CORETYPE $<

bench-quantise: $(BUILD)/tests/bench_quantise ## GB/s of one core, every quantiser
	@$<

# The same program, but it looks for its libraries beside itself.
BUNDLE     = $(BUILD)/fp4d-bundle
$(BUILD)/bundled/fp4d: LDLIBS += -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../lib'
$(BUILD)/bundled/fp4d: $(BUILD)/trainer/main.o $(LIBRARY)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) -o $@ $^ $(LDLIBS)

bundle: $(BUILD)/bundled/fp4d $(PLUGIN) ## a folder with fp4d and its libraries, to be copied to other machines
	@scripts/bundle.sh $< $(PLUGIN) $(BUNDLE)

deps: ## install the packages that building needs (Debian, Ubuntu)
	@scripts/deps.sh build

demo: ## train bf16 and mxfp4-row-sr side by side on real text: curves, a kill, a sample
	@scripts/deps.sh demo
	@$(MAKE) -j$(JOBS) --no-print-directory all
	@scripts/demo.sh $(PROGRAM)

# Everything: unit tests natively, for aarch64 and under sanitizers, then the
# program from outside.
check: ## every test; the last line is "N passed, N failed"
	@scripts/deps.sh check
	@$(MAKE) -j$(JOBS) --no-print-directory all units worlds
	@$(MAKE) -j$(JOBS) --no-print-directory SANITIZE=1 all units
	@$(MAKE) -j$(JOBS) --no-print-directory CROSS=aarch64 units
	@BUILD=$(BUILD) tests/check

clean: ## remove the build
	rm -rf $(BUILD)

-include $(GPU_TESTS:%=%.d) $(MODEL_OBJECTS:.o=.d) $(OBJECTS:.o=.d) $(UNITS:%=%.d) $(WORLDS:%=%.d) $(BUILD)/trainer/main.d
