// Thread-local words of the static block: reaching them takes no call, even from a module loaded at run time.
#ifndef JAX_TT_CUDA_EMULATION_FAST_TLS_H_
#define JAX_TT_CUDA_EMULATION_FAST_TLS_H_

#if defined(__linux__)
#define JAX_TT_FAST_TLS __attribute__((tls_model("initial-exec")))
#else
#define JAX_TT_FAST_TLS
#endif

#endif  // JAX_TT_CUDA_EMULATION_FAST_TLS_H_
