// The ranks that have passes of their own.
#pragma once

// The only list of them: CMake reads this line and compiles fast_rank.cu.in once for each, and fast.cu makes the
// choice and its checks from it.  FastTile says how many threads and how much memory a rank gets.
#define JAX_TT_FAST_RANKS(each) each(16) each(32) each(64) each(128)
