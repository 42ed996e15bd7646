#include "tensors.h"

#include <string>

#include "dlpack.h"

namespace fastguard {

namespace {

TensorAccess* access = nullptr;  // never freed: it must outlive every call, also at interpreter exit
const dlpack::ExchangeAPI* exchange = nullptr;
const PyGetSetDef* getter = nullptr;
TensorPath path;

const dlpack::ExchangeAPI* find_api(py::handle capsule) {
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
bool lazy_as_python_says(PyObject* tensor, const char* question) { return py::handle(tensor).attr(question)().ptr() == Py_True; }

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

std::vector<int64_t> integers(py::handle sequence) {
  const py::Held held = py::Held::of(sequence);
  std::vector<int64_t> values;
  for (size_t i = 0; i < held.size(); ++i) values.push_back(py::integer(held.items()[i]));
  return values;
}

// The same of elements of any dtype; `name` is torch's of it.
template <class Read>
bool describe_any(PyObject* tensor, Read& x, std::string& name) {
  py::object description = access->describe(tensor);
  if (description.is_none()) return false;
  x.data = reinterpret_cast<char*>(py::integer(description.item(0)));
  name = py::text(description.item(1));
  x.shape = integers(description.item(2));
  x.strides = integers(description.item(3));
  return true;
}

bool describe(PyObject* tensor, Strided& x, bool& complex) {
  std::string name;
  if (!describe_any(tensor, x, name)) return false;
  complex = name.rfind("complex", 0) == 0;
  if (name == "float32" || name == "complex64") x.dtype = DType::f32;
  else if (name == "float64" || name == "complex128") x.dtype = DType::f64;
  else if (name == "float16" || name == "complex32") x.dtype = DType::f16;
  else if (name == "bfloat16") x.dtype = DType::bf16;
  else return false;
  return true;
}

// The code and bits of torch's dtypes, as DLPack has them.
bool describe(PyObject* tensor, Elements& x) {
  std::string name;
  if (!describe_any(tensor, x, name)) return false;
  static const struct { const char* prefix; uint8_t code; } kinds[] = {
      {"float", dlpack::kFloat}, {"bfloat", dlpack::kBfloat}, {"complex", dlpack::kComplex}, {"int", dlpack::kInt}, {"uint", dlpack::kUInt}};
  x.code = dlpack::kBool;
  x.bits = 8;
  if (name == "bool") return true;
  for (const auto& kind : kinds) {
    const size_t length = std::char_traits<char>::length(kind.prefix);
    if (name.compare(0, length, kind.prefix) || name.find_first_not_of("0123456789", length) != std::string::npos) continue;
    x.code = kind.code;
    x.bits = std::stoi(name.substr(length));
    return true;
  }
  return false;
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
    py::object prepared = access->prepare(tensor, py::cast(index));
    if (!read_plain(prepared.ptr(), view)) return false;
    values.push_back(std::move(prepared));
    return true;
  } catch (const py::error_already_set&) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw;
    PyErr_Clear();  // whoever reads it otherwise will say it in words
    return false;
  }
}

void set_tensor_access(TensorAccess given, py::handle exchange_api, py::List examples) {
  const dlpack::ExchangeAPI* api = find_api(exchange_api);
  Py_INCREF(exchange_api.ptr());  // the capsule owns the struct
  exchange = api;
  delete access;
  access = new TensorAccess(std::move(given));
  getter = grad_getter();
  path = TensorPath(examples);
}

py::object gradient_of(PyObject* parameter) {
  static PyObject* name = PyUnicode_InternFromString("grad");
  return py::steal(getter && is_plain_type(parameter) ? getter->get(parameter, getter->closure)
                                                      : PyObject_GetAttr(parameter, name));
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
      py::object prepared = prepare(tensor, py::cast(i));
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

bool read_any(PyObject* tensor, Elements& x) {
  dlpack::Tensor t;
  if (!is_plain_type(tensor)) return false;
  if (!exchange) return describe(tensor, x);
  if (!path.has_storage(tensor)) return false;
  if (exchange->tensor_from_object(tensor, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (t.device.type != dlpack::kCPU) return false;
  x.data = static_cast<const char*>(t.data) + t.byte_offset;
  x.code = t.dtype.code;
  x.bits = t.dtype.bits;
  x.shape.assign(t.shape, t.shape + t.ndim);
  x.strides.assign(size_t(t.ndim), 1);
  int64_t numel = 1, last = 0;
  for (int d = t.ndim - 1; d >= 0; --d) {
    x.strides[d] = t.strides ? t.strides[d] : numel;
    last += (t.shape[d] - 1) * x.strides[d];
    numel = times(numel, t.shape[d]);
  }
  if (numel <= 0) return numel == 0;
  return t.data && path.holds(tensor, x.data, (last + 1) * (x.bits / 8)) && !lazy(tensor, x.code == dlpack::kComplex);
}

bool locate_tensors(const py::Held& tensors, std::vector<int64_t>& addresses, std::vector<int64_t>& sizes) {
  if (!access) throw std::runtime_error("set_tensor_access was not called");
  if (!exchange) return false;
  const size_t n = tensors.size();
  addresses.reserve(n);
  sizes.reserve(n);
  dlpack::Device first{}, device{};
  for (size_t i = 0; i < n; ++i) {
    PyObject* tensor = tensors.items()[i];
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
