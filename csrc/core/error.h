// Statuses of the C ABI and the text of the last one.
#pragma once

namespace stretto {

// Remembers the text for stretto_error() on this thread and returns -1. printf-style.
__attribute__((format(printf, 1, 2))) int error(const char* format, ...);

}  // namespace stretto
