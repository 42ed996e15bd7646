// From Python tensors to views: torch's DLPack C exchange API where it exists, calls into Python where it does not.
#pragma once
#include <vector>

#include "objects.h"
#include "prefetch.h"
#include "sample.h"
#include "view.h"

namespace fastguard {

// The Python side of reading tensors, set once by fastguard.kernels.cpu.
struct TensorAccess {
  py::object tensor_type;     // exact types that need no preparation: torch.Tensor, torch.nn.Parameter
  py::object parameter_type;
  py::object gradient;        // the descriptor torch.Tensor.grad
  py::object prepare;         // callable(tensor, index): a plain CPU tensor with the same values, or raises
  py::object prepare_writable;  // the same, over the same memory
  py::object describe;        // callable(tensor): (address, dtype name, shape, strides), when there is no exchange API
};

// `examples` as for TensorPath.
void set_tensor_access(TensorAccess access, py::handle exchange_api, py::List examples);

// `parameter.grad`, None included; a new reference. Throws what Python raised.
py::object gradient_of(PyObject* parameter);

// What to do with a tensor that cannot be read as it is: sparse, lazily conjugated, a subclass, another dtype, …
enum class Odd { refuse, prepare, prepare_writable };

// Appends a view of each of `tensors`, and to `keep_alive` whatever was made to serve the odd ones. False if there is
// an odd one and it is to be refused.
bool read_tensors(PyObject* const* tensors, size_t count, Odd odd, std::vector<View>& views,
                  std::vector<py::object>& keep_alive);

// A view of `tensor`; false if it is odd.
bool read_plain(PyObject* tensor, View& view);

// A view of the values of a sparse tensor of an exact type, coalesced, which `values` then holds; false if it is anything
// else, or cannot be read.
bool read_values(PyObject* tensor, size_t index, View& view, std::vector<py::object>& values);

// Whether no Python code has a say in what is read of `tensor`: an exact torch.Tensor or Parameter.
bool is_plain_type(PyObject* tensor);

const TensorPath& tensor_path();

// Fills `x`; false if `tensor` is odd, or complex.
bool read_strided(PyObject* tensor, Strided& x);

// Fills `x`; false if `tensor` is odd.
bool read_any(PyObject* tensor, Elements& x);

// For kernels on a device: address and (real elements << 2 | DType) of each of `tensors`. False unless all are dense, on
// one device (which is not looked at otherwise), and need no preparing; always false without the exchange API.
bool locate_tensors(const py::Held& tensors, std::vector<int64_t>& addresses, std::vector<int64_t>& sizes);

}  // namespace fastguard
