"""The common part of the GPU benchmarks: work, contenders, timing on the device."""
