export PYTHONUNBUFFERED=1 PYTHONPATH=.
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release >/dev/null; cmake --build build -j 16 2>&1 | tail -1
(time timeout 330 python3 -m pytest tests/gpu tests/kernels tests/tune tests/triton -n 5 -p no:cacheprovider) > $OUT/log 2>&1; grep -E "^(FAILED|ERROR)|passed|failed|real" $OUT/log | tail
