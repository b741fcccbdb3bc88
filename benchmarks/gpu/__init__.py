"""What the benchmarks of a GPU share: work, contenders, timing on the device."""
