// The Python module paged_kv._C: loading it registers the ops; its functions choose the CPU kernels' instruction set,
// and make functions that call ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "bindings/direct.h"
#include "cpu/kernels.h"

namespace py = pybind11;
using namespace paged_kv;

namespace {

std::vector<std::string> isas(bool supported_only) {
  size_t count = 0;
  const cpu::IsaLevel* levels = cpu::isa_levels(&count);
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) {
    if (levels[i].supported || !supported_only) names.emplace_back(levels[i].name);
  }
  return names;
}

// Empty where `name` was chosen, else what is wrong with it; `argument` is what the user set.
std::string choose_isa(const std::string& argument, const std::string& name) {
  if (cpu::set_isa(name.c_str())) return "";
  std::string text = argument + ": expected an instruction set that this machine supports (";
  const char* separator = "";
  for (const std::string& isa : isas(/*supported_only=*/true)) {
    text += separator + isa;
    separator = ", ";
  }
  return text + "), got '" + name + "'";
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  if (const char* name = std::getenv("PAGED_KV_ISA"); name && *name) {
    if (std::string error = choose_isa("PAGED_KV_ISA", name); !error.empty()) throw py::import_error(error);
  }
  m.def("isas_built", [] { return isas(/*supported_only=*/false); });
  m.def("isas_supported", [] { return isas(/*supported_only=*/true); });
  m.def("isa_in_use", [] { return std::string(cpu::backend().name); });
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (std::string error = choose_isa("name", name); !error.empty()) throw py::value_error(error);
      },
      py::arg("name"));
  m.def(
      "direct_calls",
      [](const std::string& library) { return py::reinterpret_steal<py::object>(bindings::direct_calls(library)); },
      py::arg("library"));
}
