#include <torch/library.h>

TORCH_LIBRARY(paged_kv, m) {}
