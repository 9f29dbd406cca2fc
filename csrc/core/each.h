// Lists of (type, name) pairs, as kernels.def has them.
#pragma once

#define STRETTO_PARAMETER(type, name) type name,
#define STRETTO_FIELD(type, name) type name;
#define STRETTO_NAME(type, name) name,

// what(pair) for each pair, one after the other: a macro is expanded again for every pass over what it left.
#define STRETTO_EACH(what, ...) STRETTO_PASSES(STRETTO_FIRST(what, __VA_ARGS__))
#define STRETTO_FIRST(what, pair, ...) what pair __VA_OPT__(STRETTO_NEXT STRETTO_NOTHING()()(what, __VA_ARGS__))
#define STRETTO_NEXT() STRETTO_FIRST
#define STRETTO_NOTHING()
#define STRETTO_PASSES(...) STRETTO_PASS(STRETTO_PASS(STRETTO_PASS(__VA_ARGS__)))  // of up to 27 pairs
#define STRETTO_PASS(...) STRETTO_THREE(STRETTO_THREE(STRETTO_THREE(__VA_ARGS__)))
#define STRETTO_THREE(...) STRETTO_ONE(STRETTO_ONE(STRETTO_ONE(__VA_ARGS__)))
#define STRETTO_ONE(...) __VA_ARGS__
