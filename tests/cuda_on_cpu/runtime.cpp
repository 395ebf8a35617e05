// The functions of the CUDA runtime API that csrc/cuda uses. There is one device, an sm_90 with two multiprocessors;
// its memory is the CPU's, and a stream's work is done when the call returns.
#include "runtime.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace cuda_on_cpu {
namespace {

constexpr size_t kDefaultSharedBytes = 48 << 10;  // without cudaFuncSetAttribute
constexpr size_t kMaxSharedBytes = 227 << 10;

std::mutex mutex;
std::map<const void*, size_t> shared_bytes_allowed;
std::string failure;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<cudaError_t> wanted_error = cudaSuccess;

struct Symbol {
  std::string name;
  uintptr_t begin, end;  // relative to where the library is loaded
};

// All functions of a library, local ones too: kernels stand in unnamed namespaces.
std::vector<Symbol> read_symbols(const char* library) {
  std::ifstream file(library, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string image = content.str();
  std::vector<Symbol> symbols;
  Elf64_Ehdr header;
  if (image.size() < sizeof(header)) return symbols;
  std::memcpy(&header, image.data(), sizeof(header));
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  std::memcpy(sections.data(), image.data() + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    for (uint64_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, image.data() + section.sh_offset + at, sizeof(symbol));
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_size == 0) continue;
      symbols.push_back({image.data() + sections[section.sh_link].sh_offset + symbol.st_name, symbol.st_value,
                         symbol.st_value + symbol.st_size});
    }
  }
  return symbols;
}

std::string find_name(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) return "unknown code";
  static std::map<std::string, std::vector<Symbol>> libraries;
  auto [entry, is_new] = libraries.try_emplace(info.dli_fname);
  if (is_new) entry->second = read_symbols(info.dli_fname);
  const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  for (const Symbol& symbol : entry->second) {
    if (offset < symbol.begin || offset >= symbol.end) continue;
    int status = 0;
    char* demangled = abi::__cxa_demangle(symbol.name.c_str(), nullptr, nullptr, &status);
    std::string name = status == 0 ? demangled : symbol.name;
    std::free(demangled);
    return name;
  }
  return "unknown code";
}

}  // namespace

std::string describe_code(const void* address) {
  static std::map<const void*, std::string> names;
  const std::lock_guard lock(mutex);
  auto [entry, is_new] = names.try_emplace(address);
  if (is_new) entry->second = find_name(address);
  return entry->second;
}

cudaError_t record_error(cudaError_t error) { return last_error = error; }

cudaError_t report_failure(const std::string& text) {
  const std::lock_guard lock(mutex);
  failure = text;
  return record_error(cudaErrorLaunchFailure);
}

cudaError_t take_wanted_error() { return record_error(wanted_error.exchange(cudaSuccess)); }

size_t max_dynamic_shared_bytes(const void* kernel) {
  const std::lock_guard lock(mutex);
  const auto entry = shared_bytes_allowed.find(kernel);
  return entry == shared_bytes_allowed.end() ? kDefaultSharedBytes : entry->second;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" {

// For Python.
__attribute__((visibility("default"))) void cuda_on_cpu_fail_next(int error) {
  wanted_error = static_cast<cudaError_t>(error);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > kMaxSharedBytes) return record_error(cudaErrorInvalidValue);
  const std::lock_guard lock(mutex);
  shared_bytes_allowed[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorLaunchFailure:
      return failure.c_str();
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidValue:
      return "invalid argument";
    default:
      return "unspecified error";
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 2;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(kMaxSharedBytes);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      return record_error(cudaErrorInvalidValue);
  }
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (const cudaError_t error = take_wanted_error(); error != cudaSuccess) return error;
  std::memcpy(destination, source, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  if (const cudaError_t error = take_wanted_error(); error != cudaSuccess) return error;
  if (width > destination_pitch || width > source_pitch) return record_error(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(destination) + row * destination_pitch,
                static_cast<const char*>(source) + row * source_pitch, width);
  }
  return cudaSuccess;
}
}
