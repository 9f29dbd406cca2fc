#include "core/error.h"

#include <cstdarg>
#include <cstdio>

#include "abi.h"

namespace stretto {
namespace {
thread_local char last[512] = "";
}

int error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last, sizeof(last), format, arguments);
    va_end(arguments);
    return -1;
}

}  // namespace stretto

extern "C" const char* stretto_error(void) { return stretto::last; }
