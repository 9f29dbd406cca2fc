# Every target does its own set-up: .venv, the native library under build/, the package in editable form.
PYTHON ?= python3
PY := .venv/bin/python
CMAKE := .venv/bin/cmake
NINJA := $(CURDIR)/.venv/bin/ninja
NATIVE_SOURCES := $(shell find csrc -type f) CMakeLists.txt
CXX_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp')

# Tests run in as many processes as there are cores. Threads that wait for each other must then not spin.
WORKERS := -n logical --maxprocesses 4 --dist worksteal
SIDE_BY_SIDE := OMP_WAIT_POLICY=passive

.PHONY: setup demo test test-all test-asan test-tsan test-gpu check format tables wheel clean

setup: .venv/.installed build/.built

.venv/.installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -C wheel.cmake=false -e '.[dev]'
	touch $@

build/.built: .venv/.installed $(NATIVE_SOURCES)
	$(CMAKE) -S . -B build -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -DCMAKE_BUILD_TYPE=Release
	$(CMAKE) --build build
	touch $@

demo: setup
	$(PY) -m stretto demo

test: setup
	$(SIDE_BY_SIDE) $(PY) -m pytest $(WORKERS) -m "not slow and not gpu" tests

test-all: setup
	$(PY) -m pytest -m "not gpu" tests

test-gpu:
	$(PYTHON) -m pytest tests

# The tests of kernels, samplers and stores, bad inputs included, against a library built with sanitizers; the runtime must
# be loaded before Python, and what it reports goes past pytest to the terminal: pytest ends with it and shows nothing.
ASAN_TESTS := tests/kernels $(patsubst %,tests/loader/test_%.py,arrays bad_inputs_* cluster gather hetero_loader random_calls sampler store views walk)

test-asan: setup
	$(CMAKE) -S . -B build-asan -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTRETTO_SANITIZE=address,undefined
	$(CMAKE) --build build-asan
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 STRETTO_LIBRARY=build-asan/libstretto.so $(PY) -m pytest --capture=sys -m "not slow and not gpu" $(ASAN_TESTS)

# The sampler and engine tests against a library built with the thread sanitizer. Only our library is instrumented, so
# only its accesses are judged; what forks (or has PyG fork workers) and processes of their own are left to `make test`.
test-tsan: setup
	$(CMAKE) -S . -B build-tsan -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTRETTO_SANITIZE=thread
	$(CMAKE) --build build-tsan
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66 \
	OMP_NUM_THREADS=1 STRETTO_LIBRARY=build-tsan/libstretto.so $(PY) -m pytest --capture=sys -m "not slow and not gpu" -k "not fork and not exit and not ctrl_c and not two_hundred and not pyg_loader" -o timeout=0 tests/loader

check: setup
	.venv/bin/ruff check stretto tests examples benchmarks
	.venv/bin/ruff format --check stretto tests examples benchmarks
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

format: setup
	.venv/bin/ruff check --fix stretto tests examples benchmarks
	.venv/bin/ruff format stretto tests examples benchmarks
	.venv/bin/clang-format -i $(CXX_SOURCES)

# The tables of the docs, from the rows in benchmarks/results. A test fails where they differ.
tables: setup
	$(PY) -m benchmarks.tables

wheel: setup
	$(PY) -m pip wheel --quiet --no-deps -w dist-wheel .

clean:
	rm -rf .venv build build-asan build-tsan dist-wheel
