// Cuts a graph into tasks of about equal cost, at places that depend on the graph alone.
#include "abi.h"

// A task costs its edges plus its rows: empty rows still have to be written. A row longer than two tasks is cut into
// pieces of one task each, so that a single hub occupies every thread.
extern "C" int stretto_schedule(const int64_t* rowptr, int64_t num_rows, int64_t grain, int64_t* counts, int64_t* tasks,
                                int64_t* hubs) {
    int64_t num_tasks = 0, num_hubs = 0, num_slots = 0;
    const auto emit = [&](int64_t row_begin, int64_t row_end, int64_t begin, int64_t end, int64_t slot) {
        if (tasks) {
            int64_t* task = tasks + 5 * num_tasks;
            task[0] = row_begin, task[1] = row_end, task[2] = begin, task[3] = end, task[4] = slot;
        }
        ++num_tasks;
    };
    const auto emit_rows = [&](int64_t row_begin, int64_t row_end) {
        if (row_begin < row_end) emit(row_begin, row_end, rowptr[row_begin], rowptr[row_end], -1);
    };
    int64_t first = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t length = rowptr[row + 1] - rowptr[row];
        if (length > 2 * grain) {
            emit_rows(first, row);
            const int64_t pieces = (length + grain - 1) / grain, slot = num_slots;
            for (int64_t p = 0; p < pieces; ++p)
                emit(row, row + 1, rowptr[row] + length * p / pieces, rowptr[row] + length * (p + 1) / pieces,
                     num_slots++);
            if (hubs) hubs[3 * num_hubs] = row, hubs[3 * num_hubs + 1] = slot, hubs[3 * num_hubs + 2] = num_slots;
            ++num_hubs;
            first = row + 1;
        } else if (rowptr[row + 1] - rowptr[first] + (row + 1 - first) >= grain) {
            emit_rows(first, row + 1);
            first = row + 1;
        }
    }
    emit_rows(first, num_rows);
    counts[0] = num_tasks, counts[1] = num_hubs, counts[2] = num_slots;
    return 0;
}
