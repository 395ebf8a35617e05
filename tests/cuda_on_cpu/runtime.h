// The runtime API's state, and names for addresses in the code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace cuda_on_cpu {

// What cudaGetLastError answers next; returns `error`.
cudaError_t record_error(cudaError_t error);

// The error that the next launch or copy is to return instead of its work, asked for by a test; taken once.
cudaError_t take_wanted_error();

// The same for a kernel that failed: cudaGetErrorString answers with `text`.
cudaError_t report_failure(const std::string& text);

size_t max_dynamic_shared_bytes(const void* kernel);

// The function that an address of code lies in, demangled, from the symbol table of its library.
std::string describe_code(const void* address);

}  // namespace cuda_on_cpu
