// Thread-local words of the static block: reaching them takes no call, even from a module loaded at run time.
#pragma once

#if defined(__linux__)
#define JAX_TT_FAST_TLS __attribute__((tls_model("initial-exec")))
#else
#define JAX_TT_FAST_TLS
#endif
