#include "tensors.h"

#include <pybind11/stl.h>

#include <string>

#include "dlpack.h"

namespace fastguard {

namespace {

TensorAccess* access = nullptr;  // never freed: it must outlive every call, also at interpreter exit
const dlpack::ExchangeAPI* exchange = nullptr;
const PyGetSetDef* getter = nullptr;
TensorPath path;

const dlpack::ExchangeAPI* find_api(const py::object& capsule) {
  if (capsule.is_none()) return nullptr;
  auto* api = static_cast<dlpack::ExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw py::error_already_set();
  while (api && api->version.major != 1) api = api->previous;
  return api && api->tensor_from_object ? api : nullptr;
}

// The C function behind the descriptor torch.Tensor.grad, which saves the search for an attribute; or null.
const PyGetSetDef* grad_getter() {
  PyObject* descriptor = access->gradient.ptr();
  if (Py_TYPE(descriptor) != &PyGetSetDescr_Type) return nullptr;
  return reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
}

bool real_dtype(uint8_t code, int bits, DType& out) {
  if (code == dlpack::kBfloat && bits == 16) return out = DType::bf16, true;
  if (code != dlpack::kFloat) return false;
  if (bits == 32) return out = DType::f32, true;
  if (bits == 64) return out = DType::f64, true;
  if (bits == 16) return out = DType::f16, true;
  return false;
}

// A lazy bit that the address does not show: negation or conjugation.
bool lazy_as_python_says(PyObject* tensor, const char* question) { return py::handle(tensor).attr(question)().cast<bool>(); }

inline bool lazy(PyObject* tensor, bool complex) {
  const bool negated = path.knows_negation() ? path.is_negated(tensor) : lazy_as_python_says(tensor, "is_neg");
  return negated || (complex && lazy_as_python_says(tensor, "is_conj"));
}

// What torch tells of a tensor of an exact type. False if it has to be prepared: it is not strided memory, has a dtype
// without a kernel, or the memory that it needs is not there.
bool ask(PyObject* tensor, dlpack::Tensor& t, DType& dtype, bool& complex) {
  if (!path.has_storage(tensor)) return false;  // torch would raise, which takes it a millisecond
  if (exchange->tensor_from_object(tensor, &t) != 0) {
    PyErr_Clear();  // `prepare` finds the reason and says it in words
    return false;
  }
  complex = t.dtype.code == dlpack::kComplex;
  return complex ? real_dtype(dlpack::kFloat, t.dtype.bits / 2, dtype) : real_dtype(t.dtype.code, t.dtype.bits, dtype);
}

bool view_through_exchange(PyObject* tensor, View& view, dlpack::Device& device) {
  dlpack::Tensor t;
  DType dtype;
  bool complex;
  if (!ask(tensor, t, dtype, complex)) return false;
  device = t.device;
  view = make_view(static_cast<char*>(t.data) + t.byte_offset, dtype, complex, t.ndim, t.shape, t.strides);
  if (view.numel <= 0) return view.numel == 0;
  const int64_t span = view.layout ? extent(view) : view.numel;
  return t.data && path.holds(tensor, view.data, span * itemsize(dtype)) && !lazy(tensor, complex);
}

bool describe(PyObject* tensor, Strided& x, bool& complex) {
  py::object description = access->describe(py::handle(tensor));
  if (description.is_none()) return false;
  auto [address, name, shape, strides] =
      description.cast<std::tuple<uintptr_t, std::string, std::vector<int64_t>, std::vector<int64_t>>>();
  complex = name.rfind("complex", 0) == 0;
  if (name == "float32" || name == "complex64") x.dtype = DType::f32;
  else if (name == "float64" || name == "complex128") x.dtype = DType::f64;
  else if (name == "float16" || name == "complex32") x.dtype = DType::f16;
  else if (name == "bfloat16") x.dtype = DType::bf16;
  else return false;
  x.data = reinterpret_cast<char*>(address);
  x.shape = std::move(shape);
  x.strides = std::move(strides);
  return true;
}

bool view_through_python(PyObject* tensor, View& view) {
  Strided x;
  bool complex;
  if (!describe(tensor, x, complex)) return false;
  view = make_view(x.data, x.dtype, complex, int(x.shape.size()), x.shape.data(), x.strides.data());
  return view.numel >= 0;
}

}  // namespace

bool is_plain_type(PyObject* tensor) {
  auto type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return access && (type == access->tensor_type.ptr() || type == access->parameter_type.ptr());
}

const TensorPath& tensor_path() { return path; }

bool read_plain(PyObject* tensor, View& view) {
  if (!access) throw std::runtime_error("set_tensor_access was not called");
  if (!is_plain_type(tensor)) return false;
  if (!exchange) return view_through_python(tensor, view);
  dlpack::Device device;
  return view_through_exchange(tensor, view, device) && device.type == dlpack::kCPU;
}

bool read_values(PyObject* tensor, size_t index, View& view, std::vector<py::object>& values) {
  if (!is_plain_type(tensor) || path.has_storage(tensor)) return false;
  try {
    py::object prepared = access->prepare(py::handle(tensor), index);
    if (!read_plain(prepared.ptr(), view)) return false;
    values.push_back(std::move(prepared));
    return true;
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_Exception)) return false;  // whoever reads it otherwise will say it in words
    throw;
  }
}

void set_tensor_access(TensorAccess given, py::object exchange_api, const py::list& examples) {
  const dlpack::ExchangeAPI* api = find_api(exchange_api);
  exchange_api.inc_ref();  // the capsule owns the struct
  exchange = api;
  delete access;
  access = new TensorAccess(std::move(given));
  getter = grad_getter();
  path = TensorPath(examples);
}

py::object gradient_of(PyObject* parameter) {
  static PyObject* name = PyUnicode_InternFromString("grad");
  PyObject* gradient = getter && is_plain_type(parameter) ? getter->get(parameter, getter->closure)
                                                          : PyObject_GetAttr(parameter, name);
  if (!gradient) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(gradient);
}

bool read_tensors(PyObject* const* tensors, size_t count, Odd odd, std::vector<View>& views,
                  std::vector<py::object>& keep_alive) {
  views.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = tensors[i];
    if (i + 8 < count) __builtin_prefetch(tensors[i + 8]);
    View view;
    if (!read_plain(tensor, view)) {
      if (odd == Odd::refuse) return false;
      const py::object& prepare = odd == Odd::prepare ? access->prepare : access->prepare_writable;
      py::object prepared = prepare(py::handle(tensor), i);
      if (!read_plain(prepared.ptr(), view))
        throw std::runtime_error("tensor " + std::to_string(i) + " cannot be read: it was prepared to a " +
                                 std::string(Py_TYPE(prepared.ptr())->tp_name) + " that is not dense CPU memory");
      keep_alive.push_back(std::move(prepared));
    }
    __builtin_prefetch(view.data);
    views.push_back(std::move(view));
  }
  return true;
}

bool read_strided(PyObject* tensor, Strided& x) {
  if (!access) throw std::runtime_error("set_tensor_access was not called");
  if (!is_plain_type(tensor)) return false;
  bool complex = false;
  if (!exchange) return describe(tensor, x, complex) && !complex;
  dlpack::Tensor t;
  if (!ask(tensor, t, x.dtype, complex) || complex || t.device.type != dlpack::kCPU) return false;
  x.data = static_cast<char*>(t.data) + t.byte_offset;
  x.shape.assign(t.shape, t.shape + t.ndim);
  x.strides.assign(size_t(t.ndim), 1);
  int64_t numel = 1, last = 0;
  for (int d = t.ndim - 1; d >= 0; --d) {
    x.strides[d] = t.strides ? t.strides[d] : numel;
    last += (t.shape[d] - 1) * x.strides[d];
    numel = times(numel, t.shape[d]);
  }
  if (numel <= 0) return numel == 0;
  return t.data && path.holds(tensor, x.data, (last + 1) * itemsize(x.dtype)) && !lazy(tensor, false);
}

bool locate_tensors(const py::tuple& tensors, std::vector<int64_t>& addresses, std::vector<int64_t>& sizes) {
  if (!access) throw std::runtime_error("set_tensor_access was not called");
  if (!exchange) return false;
  const Py_ssize_t n = PyTuple_GET_SIZE(tensors.ptr());
  addresses.reserve(size_t(n));
  sizes.reserve(size_t(n));
  dlpack::Device first{}, device{};
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors.ptr(), i);
    View view;
    if (!is_plain_type(tensor) || !view_through_exchange(tensor, view, device) || view.layout) return false;
    if (i == 0) first = device;
    if (device.type != first.type || device.id != first.id) return false;
    addresses.push_back(int64_t(reinterpret_cast<intptr_t>(view.data)));
    sizes.push_back(view.numel << 2 | int64_t(view.dtype));
  }
  return true;
}

}  // namespace fastguard
