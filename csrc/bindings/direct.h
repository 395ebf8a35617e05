// Ops as Python functions of their own. torch.ops takes 2 us to hand over what paged_attention takes, which finds each
// argument by the text of the schema; these are the ops that a model calls in every layer, and call the dispatcher as
// C++ does, with the same checks, hooks and backends behind it.
#pragma once

#include <Python.h>

#include <string>

namespace paged_kv::bindings {

// (reshape_and_cache, paged_attention) of torch.ops.<library>, a new reference. Each takes the arguments of its schema
// by position, none left out; paged_attention then `out` and `lse`, both tensors or both None, and returns
// (out, lse). They return NotImplemented, and have done nothing, where torch.ops has to be asked: for any object that
// is not exactly of the type of its argument (a tensor or a parameter, but no other subclass; no symbolic size), and
// where a torch function mode wants to know of calls.
PyObject* direct_calls(const std::string& library);

}  // namespace paged_kv::bindings
